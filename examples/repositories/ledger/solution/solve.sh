sed -i '6{h;d};7G' /app/ledger/transfers.py
