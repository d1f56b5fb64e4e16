import unittest

from ledger.accounts import Accounts
from ledger.transfers import transfer


class Transfers(unittest.TestCase):
    def setUp(self):
        self.accounts = Accounts()
        self.accounts.deposit("ann", 500)

    def test_money_moves(self):
        transfer(self.accounts, "ann", "bob", 200)
        self.assertEqual(self.accounts.balances, {"ann": 300, "bob": 200})

    def test_a_transfer_that_fails_changes_nothing(self):
        with self.assertRaises(ValueError):
            transfer(self.accounts, "ann", "bob", 501)
        self.assertEqual(self.accounts.balances, {"ann": 500})

    def test_to_oneself(self):
        transfer(self.accounts, "ann", "ann", 500)
        self.assertEqual(self.accounts.balances, {"ann": 500})
        with self.assertRaises(ValueError):
            transfer(self.accounts, "ann", "ann", 501)
