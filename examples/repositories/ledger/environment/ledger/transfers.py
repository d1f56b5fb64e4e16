"""Payments from one account to another."""


def transfer(accounts, payer, receiver, cents):
    """Moves money. Raises ValueError, and changes nothing, if the payer has too little."""
    accounts.deposit(receiver, cents)
    accounts.withdraw(payer, cents)
