"""Builds the tokenizer and the data of a run from its settings."""

from gptattn.data.run_data import Request, RunData, Source
from gptattn.data.tasks import TaskData
from gptattn.data.text import PlainText, cache_folder
from gptattn.data.tokenizer import TaskIds, Tokenizer, encode_prompt
from gptattn.errors import ConfigError
from gptattn.settings.budget import limit_validation
from gptattn.settings.config import MASK_DOCUMENTS, TrainConfig
from gptattn.settings.construct import construct
from gptattn.settings.values import check_type


def build_tokenizer(cfg: TrainConfig) -> Tokenizer:
    """Build the tokenizer; if its vocabulary comes from the text, it has none yet.

    Raises ConfigError or DataError, naming the field.
    """
    return construct("tokenizer", cfg.tokenizer, {}, cfg.allow_targets, Tokenizer)


def build_data(cfg: TrainConfig, tokenizer: Tokenizer | None = None) -> RunData:
    """Load the text of these settings and tokenize it, or draw the rows of their task.

    `tokenizer`: one that is built already. Raises DataError or ConfigError, naming the field, or
    DiskError if the cache cannot be used.
    """
    request = build_request(cfg, tokenizer or build_tokenizer(cfg))
    data = build_source(cfg).load(request)
    if cfg.budget.accuracy is not None and data.val_bytes is not None:
        raise ConfigError("budget.accuracy", "works only with a task, such as data=recall")
    for length in cfg.validation.lengths:
        if not isinstance(data, TaskData):
            of_text = "of a text, gptattn-evaluate measures the loss at any length"
            raise ConfigError("validation.lengths", f"works only with a task; {of_text}")
        data.task.check_length("validation.lengths", length)
    if cfg.sample.tokens and isinstance(data.tokenizer, TaskIds):
        raise ConfigError(
            "sample.tokens", f"{request.data_name} has no text that could go on; give 0"
        )
    if cfg.sample.tokens and cfg.sample.prompt is not None:
        encode_prompt(request.tokenizer, cfg.sample.prompt)
    return data


def build_request(cfg: TrainConfig, tokenizer: Tokenizer) -> Request:
    """Return what these settings ask of a source of data."""
    mask_documents = cfg.data.get(MASK_DOCUMENTS, False)
    check_type(f"data.{MASK_DOCUMENTS}", mask_documents, bool)
    return Request(
        tokenizer=tokenizer,
        context_length=cfg.model.context_length,
        val_fraction=cfg.validation.fraction,
        mask_documents=mask_documents,
        cache=cache_folder(cfg.cache_dir),
        data_name=f"data={cfg.choices['data']}",
        tokenizer_name=cfg.choices["tokenizer"],
        val_tokens=limit_validation(cfg),
    )


def build_source(cfg: TrainConfig) -> Source:
    """Build the source of the data, which is not read yet. Raises ConfigError, naming the field."""
    # How the text is used is nothing that its source has to know.
    own = {key: value for key, value in cfg.data.items() if key != MASK_DOCUMENTS}
    found = construct("data", own, {"cache_dir": cfg.cache_dir}, cfg.allow_targets)
    if isinstance(found, str):  # a function of the user's
        return PlainText([found])
    if not isinstance(found, Source):
        raise ConfigError(
            "data._target_",
            "does not give text; name a gptattn.data.run_data.Source, or a function that returns "
            "a str",
        )
    return found
