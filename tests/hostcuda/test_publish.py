"""Weights on their way to engines, on the device: tests/dist/test_weights_*.py as they stand."""

from tests.dist.test_weights_reshard import (  # noqa: F401
    test_a_failure_in_any_thread_of_a_publish_ends_all_ranks_at_once,
    test_engines_are_filled_exactly_and_outlive_a_rank_that_dies,
    test_links_start_in_one_order_on_every_rank,
    test_only_what_has_changed_is_sent_and_an_engine_that_dies_gets_all,
)
