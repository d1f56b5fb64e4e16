"""Half-open intervals of seconds, (start, end)."""


def merge(intervals):
    """Returns the union of intervals as few ones, in order."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def total(intervals):
    """Returns the seconds that intervals cover."""
    return sum(end - start for start, end in merge(intervals))
