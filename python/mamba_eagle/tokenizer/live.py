"""The samples that have not ended, by the engine's names and by those that clients may use."""

from mamba_eagle.core import shown
from mamba_eagle.tokenizer.errors import DuplicateRid
from mamba_eagle.tokenizer.sample import PromptRequest, Sample


class LiveSamples:
    """A request's names stay taken until all of its samples have ended."""

    def __init__(self) -> None:
        self._samples: dict[str, Sample] = {}  # by engine rid
        self._names: dict[str, list[Sample]] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def free_names(self, rid: str, prompts: list[PromptRequest]) -> set[str]:
        """All names of a request that may start.

        Raises: DuplicateRid if one of them is taken.
        """
        names = {rid}
        for prompt in prompts:
            names.update((prompt.rid, *prompt.sample_rids))
        if taken := names & self._names.keys():
            raise DuplicateRid(
                f"rid = {shown(min(taken))}: a request of this name is running: choose another, or "
                "omit it"
            )
        return names

    def add(self, sample: Sample) -> None:
        self._samples[sample.engine_rid] = sample
        for name in {sample.request.rid, sample.prompt.rid, sample.rid}:
            self._names.setdefault(name, []).append(sample)

    def get(self, engine_rid: str) -> Sample | None:
        return self._samples.get(engine_rid)

    def named(self, rid: str | None) -> list[Sample]:
        """The samples of exactly this name, those that have ended too; None: all that are live."""
        return list(self._samples.values() if rid is None else self._names.get(rid, ()))

    def remove(self, sample: Sample) -> None:
        """It has ended."""
        del self._samples[sample.engine_rid]
        if sample.request.open == 0:
            for name in sample.request.names:
                self._names.pop(name, None)
