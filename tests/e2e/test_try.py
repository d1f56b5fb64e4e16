"""`megagrpo try` on a real engine, with the model as it is in its folder and without a trainer."""

import re
import shutil

import pytest
from run_megagrpo import succeed, write_experiment

from tests import games

PATIENT = {"start_timeout_s": 450.0}
TURN_ENDS = {"max_response_tokens": 24, "stop_token_ids": [4, 5, 6, 7]}


def test_rollouts_with_an_environment_are_printed_as_conversations(experiments):
    shutil.copy(games.__file__, experiments / "games_of_tests.py")
    environment = {"function": "games_of_tests:Sums", "history": "last", "max_turns": 3}
    folder = experiments / "try_environment"
    experiment = write_experiment(folder, sampling=TURN_ENDS | {"environment": environment}, rollout=PATIENT)
    rollouts = succeed("try", experiment, "--prompts", "2").stdout.split("== prompt ")[1:]
    assert [text.split(",")[0] for text in rollouts] == ["0", "1"]
    for text in rollouts:
        samples, said = (text.count("-- sample") or 1, re.findall(r"^ +model > (.*)$", text, re.MULTILINE))
        assert len(said) == samples
        own = re.search(rf"; (\d+) tokens of {samples} sample\(s\) would be trained on", text)
        # a token a character, or a special token such as <bos>, and the ends of turns
        assert own and int(own[1]) >= sum(len(re.sub("<[a-z]+>", "x", turn)) for turn in said)
        ended = "tokens: a turn reached the limit" + "|done|turns" * (samples == 3)
        assert re.search(rf"reward .*ended by ({ended})", text), text
    assert not (folder / "metrics.jsonl").exists() and (folder / "try" / "config.yaml").is_file()


@pytest.mark.slow
def test_responses_of_one_turn_are_printed_with_their_grade(experiments):
    experiment = write_experiment(experiments / "try_grader", rollout=PATIENT)
    (shown,) = succeed("try", experiment, "--prompts", "1").stdout.split("== prompt ")[1:]
    assert re.search(r"^ +prompt \| \d+", shown, re.MULTILINE) and shown.count(" model >") == 1
    assert re.search(r"^reward (0|1|0\.\d+); \d+ tokens of 1 sample\(s\) would be trained on$", shown, re.MULTILINE)
