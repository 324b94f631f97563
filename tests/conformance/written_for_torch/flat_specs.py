"""Log specs of the group `torchrun.logs_specs`, written for torch."""

import os

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest


class Flat(DefaultLogsSpecs):
    """All files in one folder."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        folder = str(self.root_log_dir)
        os.makedirs(folder, exist_ok=True)

        def at(name: str) -> dict[int, str]:
            return {rank: os.path.join(folder, f"{name}{rank}") for rank in envs}

        for rank, path in at("error").items():
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = path
        return LogsDest(stdouts=at("out"), stderrs=at("err"), error_files=at("error"))
