#!/bin/bash
# 1 if all tests pass, else 0.
cd /app
if python3 -m unittest discover -s /tests -p "test_*.py"; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
