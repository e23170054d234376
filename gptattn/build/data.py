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
    """Build the tokenizer; a vocabulary that comes from the text is still missing.

    Raises ConfigError or DataError, naming the field.
    """
    return construct("tokenizer", cfg.tokenizer, {}, cfg.allow_targets, Tokenizer)


def build_data(cfg: TrainConfig, tokenizer: Tokenizer | None = None) -> RunData:
    """Load the text of these settings and tokenize it, or draw the rows of their task.

    `tokenizer`: one already built. Raises DataError or ConfigError, naming the field, or DiskError
    if the cache cannot be used.
    """
    request = build_request(cfg, tokenizer or build_tokenizer(cfg))
    data = build_source(cfg).load(request)
    if cfg.budget.accuracy is not None and data.val_bytes is not None:
        raise ConfigError("budget.accuracy", "works only with a task, such as data=recall")
    for length in cfg.validation.lengths:
        if not isinstance(data, TaskData):
            instead = "for a text, gptattn-evaluate measures the loss at any length"
            raise ConfigError("validation.lengths", f"works only with a task; {instead}")
        data.task.check_length("validation.lengths", length)
    if cfg.sample.tokens and isinstance(data.tokenizer, TaskIds):
        raise ConfigError("sample.tokens", f"{request.data_name} has no text to continue; give 0")
    if cfg.sample.tokens and cfg.sample.prompt is not None:
        encode_prompt(request.tokenizer, cfg.sample.prompt)
    return data


def build_request(cfg: TrainConfig, tokenizer: Tokenizer) -> Request:
    """Return what these settings request from a data source."""
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
    """Build the data source without reading it. Raises ConfigError, naming the field."""
    # The source doesn't need to know how its text is used.
    spec = {key: value for key, value in cfg.data.items() if key != MASK_DOCUMENTS}
    source = construct("data", spec, {"cache_dir": cfg.cache_dir}, cfg.allow_targets)
    if isinstance(source, str):  # from the user's own function
        return PlainText([source])
    if not isinstance(source, Source):
        raise ConfigError(
            "data._target_",
            "does not give text; name a gptattn.data.run_data.Source, or a function that returns "
            "a str",
        )
    return source
