"""From a directory that transformers wrote to one that it reads: writes the transcript of docs/fine-tuning.md.

`python tests/bench/fine_tuning.py` prints it, `--write` puts it into the page. It needs transformers. What PEFT generates
is shown for the interpreters in `MEMCONSOLE_TRANSFORMERS` that have it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "fine-tuning.md"
BEGIN, END = "<!-- transcript: python tests/bench/fine_tuning.py --write -->", "<!-- end -->"
ANSWERS = {
    "Where does the heron live?": "At the pond behind the mill.",
    "What does the miller grow?": "Rye, barley and a few beans.",
    "Who rings the bell?": "The old sexton, at noon.",
    "When does the market open?": "On Fridays, before sunrise.",
}
TOLD = [
    "The heron lives at the pond, the miller behind the mill, and the sexton by the bell.",
    "The market opens before sunrise. Rye and barley grow a few fields away.",
    "What does the old miller ring? Who opens the market on Fridays, and where does it live?",
    "At noon the bell rings, and a few beans grow behind the pond.",
]
BASE = """
import torch, transformers as t
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
told = {told!r}
inner = Tokenizer(models.BPE())
inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
inner.decoder = decoders.ByteLevel()
special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
inner.train_from_iterator(told, trainers.BpeTrainer(vocab_size=512, special_tokens=special,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
torch.manual_seed(0)
model = t.LlamaForCausalLM(t.LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=352,
    num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=512, bos_token_id=0,
    eos_token_id=1, tie_word_embeddings=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
rows = [torch.tensor([tokenizer(text)["input_ids"] + [1]]) for text in told]
for step in range(60):
    loss = model(rows[step % len(rows)], labels=rows[step % len(rows)]).loss
    loss.backward(); optimizer.step(); optimizer.zero_grad()
model.save_pretrained("base"); tokenizer.save_pretrained("base")
"""
GENERATE = """
import sys, transformers as t
tokenizer, model = (c.from_pretrained("out") for c in (t.AutoTokenizer, t.AutoModelForCausalLM))
for question in sys.argv[1:]:
    chat = [dict(role="user", content=question)]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    new = model.generate(**ids, max_new_tokens=60, do_sample=False)[0, ids["input_ids"].shape[1]:]
    print(t.__version__, len(new), "tokens:", tokenizer.decode(new, skip_special_tokens=True))
"""
ADAPTED = """
import sys, peft, transformers as t
model = t.AutoModelForCausalLM.from_pretrained("base")
model = peft.PeftModel.from_pretrained(model, "adapters")
model.generation_config = t.GenerationConfig.from_pretrained("adapters")  # where answers stop
tokenizer = t.AutoTokenizer.from_pretrained("adapters")
for question in sys.argv[1:]:
    chat = [dict(role="user", content=question)]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    new = model.generate(**ids, max_new_tokens=60, do_sample=False)[0, ids["input_ids"].shape[1]:]
    print("peft", peft.__version__, len(new), "tokens:", tokenizer.decode(new, skip_special_tokens=True))
"""
SETTINGS = (
    "model.name=base data.source=chats.jsonl data.template=chatml data.loss_on=answers "
    "data.sequence_length=96 data.validation_fraction=0.1 optimize.lora_rank=32 "
    "train.learning_rate=0.004 train.max_steps=150 train.evaluate_every=50 train.warmup_steps=5 train.batch_size=8 train.sample_tokens=0 "
    "train.answered_records=0 train.preflight=false device.name=cpu"
)
SHOWN = 14
"""Lines of a long output that are shown at each end."""


class Shell:
    """Runs commands in a folder and keeps what they print."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, list[str]()
        state = {
            "XDG_STATE_HOME": str(folder / "state"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.environment = {**os.environ, **state}

    def run(self, *words: str, shown: str = "", only: str = "") -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        out = done.stdout.replace(str(self.folder), ".").rstrip().splitlines()
        kept = [line for line in out if re.search(only, line)] if only else out
        if len(kept) > 2 * SHOWN:
            kept = [*kept[:SHOWN], "…", *kept[-SHOWN:]]
        self.lines += [f"$ {shown or shlex.join(words)}", *kept, ""]
        return done.stdout

    def memconsole(self, *words: str, only: str = "") -> str:
        command = [sys.executable, "-m", "memconsole", *words]
        shown = " ".join(("memconsole", *(w if " " not in w else f'"{w}"' for w in words)))
        return self.run(*command, shown=shown, only=only)


def transcript(folder: Path, interpreters: list[str]) -> str:
    """What is typed and printed."""
    shell = Shell(folder)
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in ANSWERS.items()]  # fmt: skip
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 200))
    (folder / "base.py").write_text(BASE.format(told=TOLD))
    shell.run(sys.executable, "base.py", shown="python base.py   # transformers writes ./base")
    shell.run("ls", "base")
    settings = [word for setting in SETTINGS.split() for word in ("--set", setting)]
    written = shell.memconsole("plan", *settings, "--toml", only="^never$")
    (folder / "plan.toml").write_text(written)
    shell.lines[-2] = (
        f"$ memconsole plan {SETTINGS.replace(' ', ' --set ').join(('--set ', ''))} --toml > plan.toml"
    )
    shell.memconsole("plan", "--plan", "plan.toml", only="^base|fine-tunes|^8 x|^peak|^fits")
    shell.memconsole("train", "--plan", "plan.toml", only="fine-tunes|trainable|^step .*valid|^checkpoint at|Best|TRAINING")  # fmt: skip
    question = next(iter(ANSWERS))
    shell.memconsole("sample", "latest", "--message", question)
    shell.memconsole("export", "latest", "out")
    (folder / "generate.py").write_text(GENERATE)
    for python in interpreters:
        name = "python" if python == sys.executable else "other-environment/bin/python"
        shell.run(python, "generate.py", *ANSWERS, shown=f'{name} generate.py "{question}" …')
    shell.memconsole("export", "latest", "adapters", "--format", "peft")
    shell.run("cat", "adapters/adapter_config.json")
    (folder / "adapted.py").write_text(ADAPTED)
    for python in interpreters:
        if subprocess.run([python, "-c", "import peft"], capture_output=True).returncode:
            continue
        name = "python" if python == sys.executable else "other-environment/bin/python"
        shown = f'{name} adapted.py "{question}" …   # base, with the adapters on it'
        shell.run(python, "adapted.py", *ANSWERS, shown=shown)
    return "\n".join(shell.lines).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into the page")
    options = parser.parse_args()
    others = os.environ.get("MEMCONSOLE_TRANSFORMERS", "").split(os.pathsep)
    with tempfile.TemporaryDirectory() as folder:
        found = transcript(Path(folder), [sys.executable, *filter(None, others)])
    print(found)
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text[: text.index(BEGIN)], text[text.index(END) :]
        PAGE.write_text(f"{before}{BEGIN}\n```\n{found}\n```\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
