"""Names of pages."""

import re


def slug(title):
    """Returns a title in lower case, of ASCII letters, digits and single hyphens between them."""
    return re.sub(r"[^\w]+", "-", title.lower())
