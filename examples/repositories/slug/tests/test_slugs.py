import unittest

from slugs import slug


class Slugs(unittest.TestCase):
    def test_accents_and_ends(self):
        self.assertEqual(slug("Crème brûlée, 2 ways!"), "creme-brulee-2-ways")

    def test_hyphens_are_single(self):
        self.assertEqual(slug("  a -- b_c "), "a-b-c")
        self.assertEqual(slug("!?"), "")
