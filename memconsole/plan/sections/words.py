"""Names that other tools use for settings. The search finds settings by them, and errors for an unknown key suggest the
setting."""

from __future__ import annotations

import re
from collections.abc import Iterable

WORDS: dict[str, str] = {
    "backend": "framework pytorch jax flax",
    "model.name": "architecture checkpoint pretrained model_name_or_path",
    "model.target_params": "size parameters scale",
    "model.weights": "init pretrained from_scratch init_from resume_from",
    "model.embedding_size": "item_embedding_dim embedding_dim",
    "model.adapter_size": "adapter_dim bottleneck",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers depth",
    "model.hidden_size": "d_model n_embd embed_dim hidden_dim width",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.features": "input_dim in_features",
    "model.outputs": "output_dim out_features",
    "data.source": "dataset corpus train_file dataset_name",
    "data.sequence_length": "context block_size max_length max_seq_len max_seq_length seq_len context_length window n_ctx",
    "data.stride": "overlap",
    "data.isolate_documents": "packing varlen attention_mask document_mask",
    "data.streaming": "lazy iterable",
    "data.shuffle_buffer": "shuffle buffer_size",
    "data.max_examples": "limit subset max_train_samples",
    "data.user_column": "user_id customer userid",
    "data.item_column": "item_id product movie itemid",
    "data.time_column": "timestamp date time_field",
    "data.standardize": "normalize normalization scale scaler standard_scaler zscore whiten",
    "data.template": "chat chat_template prompt format instruct sft",
    "data.loss_on": "mask completion_only assistant_only train_on_inputs",
    "data.tokenizer": "vocabulary bpe sentencepiece",
    "data.vocab_size": "vocabulary",
    "data.characters": "char char_level character_tokenizer shakespeare_char",
    "data.validation_fraction": "split holdout test_size eval",
    "data.held_out": "last tail chronological val_split train_test_split",
    "data.validation": "holdout test eval_file valid",
    "data.mix": "mixture blend weights",
    "device.name": "gpu cuda cpu mps tpu accelerator",
    "device.count": "gpus nproc world_size devices",
    "device.threads": "num_threads cores omp_num_threads workers",
    "train.objective": "dpo orpo simpo cpo preference rlhf alignment chosen rejected sft loss_type pref_loss",
    "train.dpo_beta": "beta kl pref_beta",
    "train.orpo_lambda": "beta lambda pref_beta",
    "train.simpo_beta": "beta pref_beta",
    "train.simpo_gamma": "gamma margin",
    "train.epochs": "num_train_epochs num_epochs passes",
    "train.max_steps": "iterations max_iters steps num_steps",
    "train.batch_size": "bs batch micro_batch_size per_device_train_batch_size mbs",
    "train.learning_rate": "lr max_lr peak_lr step_size",
    "train.decay_until": "lr_decay_iters lr_decay_steps decay_iters num_decay_steps",
    "train.minimum_learning_rate": "min_lr final_lr lr_end",
    "train.warmup_steps": "warm_up warmup_iters",
    "train.warmup_ratio": "warm_up warmup_fraction warmup",
    "train.schedule": "lr_scheduler lr_scheduler_type decay_lr cosine scheduler",
    "train.weight_decay": "wd l2 regularization",
    "train.grad_clip": "max_grad_norm clip clipping gradient_clip_val clip_grad_norm",
    "train.beta1": "adam_beta1 momentum betas",
    "train.beta2": "adam_beta2 betas",
    "train.epsilon": "eps adam_epsilon",
    "train.expert_balance": "router_aux_loss_coef moe aux_loss load_balancing router",
    "train.dropout": "resid_pdrop embd_pdrop regularization",
    "train.attention_dropout": "attn_pdrop attn_dropout regularization",
    "train.ema_decay": "ema average polyak",
    "train.seed": "random reproducible random_state",
    "train.log_every": "logging_steps log_interval",
    "train.tensorboard": "report_to logger logging tb",
    "train.deterministic": "reproducible cudnn",
    "train.evaluate_every": "eval_steps eval_interval eval_every validation",
    "train.evaluation_batches": "eval_iters limit_val_batches",
    "train.evaluation_train_batches": "train_loss estimate_loss eval_train_batches",
    "train.evaluation_batch_size": "per_device_eval_batch_size eval_batch_size",
    "train.early_stopping_patience": "patience",
    "train.early_stopping_minimum": "min_delta threshold",
    "train.checkpoint_every": "save_steps save_every save_interval",
    "train.save_only_best": "always_save_checkpoint save_best_only save_best",
    "train.keep_checkpoints": "save_total_limit keep_last",
    "train.on_out_of_memory": "oom auto_find_batch_size",
    "train.sample_tokens": "generate generation max_new_tokens",
    "optimize.precision": "dtype amp mixed bfloat16 bf16 fp16 half float16 autocast",
    "optimize.gradient_checkpointing": "remat recompute activation_checkpointing",
    "optimize.accumulation_steps": "grad_accum grad_accumulation gradient_accumulation_steps gas accum",
    "optimize.optimizer": "optim adam adamw lion adafactor apollo galore muon sgd 8bit bitsandbytes",
    "optimize.optimizer_offload": "cpu_offload zero_offload deepspeed",
    "optimize.activation_offload": "cpu_offload",
    "optimize.optimizer_in_backward": "lomo fused_backward overlap",
    "optimize.fused_loss": "chunked_loss chunked_cross_entropy cut_cross_entropy liger fused_cross_entropy",
    "optimize.tiled_mlp": "tiled tiling alst sequence_tiling mlp_chunks chunked_mlp long_context",
    "optimize.freeze_base": "frozen freeze",
    "optimize.lora_rank": "qlora peft r lora_r adapter",
    "optimize.lora_alpha": "alpha peft scaling",
    "optimize.lora_dropout": "peft",
    "optimize.lora_targets": "target_modules peft",
    "optimize.base_storage": "qlora quant quantize quantized quantization 4bit load_in_4bit load_in_8bit bnb nf4 int8",
    "optimize.compile": "torch.compile torch_compile inductor unroll scan",
    "optimize.sharding": "fsdp zero ddp distributed parallel",
    "optimize.heap": "malloc allocator jemalloc",
}
"""By key. Words of several parts may be typed with spaces, underscores or hyphens."""


def written_alike(text: str) -> str:
    """`text` in lower case, with spaces for underscores, hyphens and dots."""
    return re.sub(r"[\s_.\-]+", " ", text.lower()).strip()


def known_as(key: str) -> tuple[str, ...]:
    """The words for `key` besides its name and its help, as they may be typed."""
    words = WORDS.get(key, "").split()
    return (*words, *(written_alike(word) for word in words if "_" in word))


def meant(word: str, keys: Iterable[str]) -> list[str]:
    """The keys of `keys` that people call `word`, with or without a section before it."""
    keys = list(keys)
    for tried in (word, word.rpartition(".")[2]):
        name = written_alike(tried)
        meant_keys = [key for key in keys if name in map(written_alike, WORDS.get(key, "").split())]
        if meant_keys:
            return meant_keys
    return []
