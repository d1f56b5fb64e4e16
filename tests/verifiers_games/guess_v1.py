"""A game of guesses with verifiers 0.4.0's interface."""

import verifiers.v1 as vf


class _Data(vf.TaskData):
    goal: int


class _Guess(vf.Task[_Data, vf.State, vf.TaskConfig]):
    pass


class _Tasks(vf.TasksetConfig):
    count: int = 10


class Tasks(vf.Taskset[_Guess, _Tasks]):
    """Numbers to guess."""

    def load(self):
        return [_Guess(_Data(prompt="?", goal=number), self.config.task) for number in range(self.config.count)]


class _Players(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Guess(vf.Env[_Players]):
    """Answers H or L until the guess is right."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            segment, won = await talk.turn(), False
            while not segment.terminated and not won:
                said = int(segment.last_reply)
                won = said == task.data.goal
                if not won:
                    segment = await talk.turn("H" if said < task.data.goal else "L")
        talk.trace.record_reward("won", float(won), 1.0)


__all__ = ["Guess", "Tasks"]
