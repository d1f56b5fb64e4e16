"""What is measured of tokens that older weights sampled: how old they are, and how far the trainer has moved since."""

from torch import Tensor

from megagrpo.algo.statistics import Reduce, moments


def staleness_metrics(lags: Tensor, log_ratio: Tensor, mask: Tensor, reduce: Reduce) -> dict[str, float]:
    """Collective. Returns lag/mean, lag/max and, of each lag that there is, lag/fraction_L and mismatch.

    lags: [T] integer, versions. log_ratio: [T] float64, old - rollout. mask: [T] bool, the tokens counted.
    mismatch/logprob_abs_mean_lag_L is the mean of |log_ratio|: of lag 0 it is numerics alone.
    """
    of_all = moments(lags[mask].double(), reduce)
    largest = max(int(of_all.max), 0) if of_all.count else 0
    metrics = {"lag/mean": of_all.mean, "lag/max": float(largest)}
    for lag in range(largest + 1):
        found = moments(log_ratio.abs()[mask & (lags == lag)], reduce)
        metrics[f"lag/fraction_{lag}"] = found.count / max(of_all.count, 1)
        if found.count:
            metrics[f"mismatch/logprob_abs_mean_lag_{lag}"] = found.mean
    return metrics
