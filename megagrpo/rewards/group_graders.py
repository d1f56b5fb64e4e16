"""Built-in group graders, which turn the scores of a group into rewards. They get only responses
with a score."""

from collections import Counter


def rank(texts: list[str], answer: str, scores: list[float]) -> list[float]:
    """Returns each score's rank in [0, 1], the best 1; equal scores share the mean of their ranks.

    For scores without a meaningful scale, such as a reward model's. A group of one gets 0.5.
    """
    if len(scores) == 1:
        return [0.5]
    ranks = [sum((other < score) + (other == score) / 2 for other in scores) for score in scores]
    return [(rank - 0.5) / (len(scores) - 1) for rank in ranks]


def distinct(texts: list[str], answer: str, scores: list[float]) -> list[float]:
    """Returns each score divided by the number of responses with the same text (up to white space):
    a diversity bonus.

    A score below 0 is not divided: repeating a bad response must not make it better.
    """
    forms = [" ".join(text.split()) for text in texts]
    counts = Counter(forms)
    return [
        score / counts[form] if score > 0 else score
        for form, score in zip(forms, scores, strict=True)
    ]
