sed -i 's/title.lower()/unicodedata.normalize("NFKD", title.lower()).encode("ascii", "ignore").decode()/' /app/slugs.py
sed -i 's/\[^\\w\]+/[^a-z0-9]+/; s/decode())/decode()).strip("-")/; s/import re/import re\nimport unicodedata/' /app/slugs.py
