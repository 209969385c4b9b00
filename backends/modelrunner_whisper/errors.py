"""Explains the engine's log: its last words, and the stages of a start. Pure."""

from modelrunner.sdk.diagnosis import Cause, Diagnosis

DIAGNOSIS = Diagnosis(
    [
        Cause(r"No module named '([^']*)'|error while loading shared libraries: (\S+?):",
              "the engine's environment is incomplete ({0}): install it again with `modelrunner install whisper`"),
        Cause(r"std::bad_alloc|MemoryError|Cannot allocate memory",
              "there is not enough memory for the model: stop other models first", memory=True),
        Cause(r"Unsupported model binary version|Unable to open file|Entry not found",
              "the model's files are damaged or of another release of CTranslate2: remove the model and pull it again"),
    ],
    [("importing", "importing"), ("loading the model", "loading weights")],
)  # fmt: skip
