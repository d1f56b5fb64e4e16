"""Accounts in cents."""


class Accounts:
    def __init__(self):
        self.balances = {}

    def deposit(self, name, cents):
        if cents < 0:
            raise ValueError("a deposit is not negative")
        self.balances[name] = self.balances.get(name, 0) + cents

    def withdraw(self, name, cents):
        if self.balances.get(name, 0) < cents:
            raise ValueError(f"{name} has too little money")
        self.balances[name] -= cents
