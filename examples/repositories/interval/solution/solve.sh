sed -i 's/start < merged/start <= merged/' /app/intervals.py
