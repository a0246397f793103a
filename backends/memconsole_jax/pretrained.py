"""Hugging Face weights as this backend loads them: the shared reader of canonical tensors."""

from memconsole_trainer.huggingface import HuggingFaceWeights, WeightsError

__all__ = ["HuggingFaceWeights", "WeightsError"]
