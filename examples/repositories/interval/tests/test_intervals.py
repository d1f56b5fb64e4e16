import unittest

from intervals import merge, total


class Intervals(unittest.TestCase):
    def test_touching_ones_are_one(self):
        self.assertEqual(merge([(1, 3), (3, 5)]), [(1, 5)])
        self.assertEqual(merge([(4, 6), (1, 2), (2, 4)]), [(1, 6)])

    def test_others_stay_apart(self):
        self.assertEqual(merge([(5, 6), (1, 2)]), [(1, 2), (5, 6)])
        self.assertEqual(merge([]), [])

    def test_total(self):
        self.assertEqual(total([(0, 10), (2, 3), (10, 12)]), 12)
