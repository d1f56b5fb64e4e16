"""Examples beside the package; the package imports none of them."""
