"""Names of options and commands in PyTorch Lightning, Hugging Face, PyG's examples and torchrun, for hints."""

from __future__ import annotations

SYNONYMS = {
    ("epochs",): "num_epochs n_epochs max_epochs num_train_epochs",
    ("lr",): "learning_rate base_lr",
    ("weight_decay",): "wd l2 l2_regularization",
    ("clip_norm",): "gradient_clip_val grad_clip clip_grad_norm max_grad_norm",
    ("scheduler",): "lr_scheduler lr_scheduler_type lr_schedule",
    ("warmup_epochs",): "warmup num_warmup_epochs",
    ("patience",): "early_stopping early_stop early_stopping_patience",
    ("eval_every",): "eval_steps eval_interval check_val_every_n_epoch val_every",
    ("checkpoint_every",): "save_every save_steps save_interval",
    ("seed",): "random_seed random_state manual_seed",
    ("dtype",): "precision fp16 bf16 amp half mixed_precision",
    ("layers",): "num_layers n_layers num_hidden_layers depth",
    ("hidden",): "hidden_dim hidden_size hidden_channels hidden_features num_hidden n_hidden dim",
    ("heads",): "num_heads n_heads num_attention_heads",
    ("dropout",): "drop_rate dropout_rate feat_drop",
    ("attention_dropout",): "attn_drop attn_dropout",
    ("norm",): "batch_norm layer_norm normalization",
    ("batch_size",): "train_batch_size per_device_train_batch_size minibatch_size",
    ("accumulate_grad_batches",): (
        "gradient_accumulation_steps gradient_accumulation grad_accumulation_steps grad_accum_steps grad_accum "
        "accumulate accumulation_steps accumulate_steps accumulate_batches accum_steps"
    ),
    ("fanout",): "num_neighbors fanouts neighbors sample_size",
    ("prefetch_batches",): "prefetch_factor",
    ("workers",): "num_workers num_processes nproc nproc_per_node world_size num_ranks ranks num_parts",
    ("workers", "device"): "gpus num_gpus n_gpus ngpus devices num_devices",
    ("device",): "gpu cuda use_cuda accelerator",
    ("timeline",): "profile profiler",
    ("out",): "output output_dir save_dir log_dir logdir default_root_dir",
    ("resume",): "resume_from_checkpoint ckpt_path checkpoint",
    ("quiet",): "silent no_progress",
}
"""Names in other programs, separated by spaces, by the options of weft that replace them."""
FAMILIAR_OPTIONS = {synonym: options for options, synonyms in SYNONYMS.items() for synonym in synonyms.split()}
"""Options of weft by the name of an option in other programs."""
EVALUATION = "weft train prints the test scores, weft report shows them; weft predict is for other graphs"
FAMILIAR_COMMANDS = {
    **dict.fromkeys(("evaluate", "eval", "test", "validate"), EVALUATION),
    **dict.fromkeys(("fit", "run"), "use weft train"),
    **dict.fromkeys(("infer", "inference"), "use weft predict"),
    **dict.fromkeys(("tune", "search"), "use weft sweep"),
    "benchmark": "use weft compare",
    "estimate": "use weft plan",
}
"""Advice by the name of a command in other programs."""


def options_for(name: str) -> tuple[str, ...]:
    """Return the options of weft that replace an option of another program, or nothing.

    Args:
        name: Name of the other program's option, or its flag without the leading dashes.
    """
    return FAMILIAR_OPTIONS.get(name.replace("-", "_").lower(), ())
