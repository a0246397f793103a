"""From a directory that transformers wrote to one that it reads: writes the transcript and the table of versions of
docs/fine-tuning.md.

`python tests/bench/fine_tuning.py` prints the transcript, `--families` the table of three families, and `--write` puts
either into the page. It needs transformers. What other versions and PEFT generate is shown for the interpreters in
`MEMCONSOLE_TRANSFORMERS`.
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
TABLE_BEGIN, TABLE_END = "<!-- versions: python tests/bench/fine_tuning.py --families --write -->", "<!-- end of versions -->"  # fmt: skip
ROUND_TRIP = Path(__file__).parents[1] / "training" / "harness" / "round_trip.py"
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
FAMILIES = {
    "gpt2": "t.GPT2Config(n_embd=128, n_layer=4, n_head=4, n_positions=512, **common)",
    "llama": "t.LlamaConfig(hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,"
    " max_position_embeddings=512, **common)",
    "gemma": "t.GemmaConfig(hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,"
    " num_key_value_heads=1, head_dim=32, max_position_embeddings=512, **common)",
}
"""How transformers is told of a small model of each family."""
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
common = dict(vocab_size=512, bos_token_id=0, eos_token_id=1, tie_word_embeddings=True)
model = t.AutoModelForCausalLM.from_config({config})
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
PROMPT, TOKENS = "The heron", 40
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

    def run(self, *words: str, shown: str = "", only: str = "", typed: str = "") -> str:
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            input=typed,
        )
        if done.returncode:
            sys.exit(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        out = done.stdout.replace(str(self.folder), ".").rstrip().splitlines()
        kept = [line for line in out if re.search(only, line)] if only else out
        if len(kept) > 2 * SHOWN:
            kept = [*kept[:SHOWN], "…", *kept[-SHOWN:]]
        self.lines += [f"$ {shown or shlex.join(words)}", *kept, ""]
        return done.stdout

    def memconsole(self, *words: str, only: str = "", typed: str = "") -> str:
        command = [sys.executable, "-m", "memconsole", *words]
        shown = " ".join(("memconsole", *(w if " " not in w else f'"{w}"' for w in words)))
        return self.run(*command, shown=shown, only=only, typed=typed)

    def begin(self, family: str) -> None:
        """Write the chats, and the model of a family as transformers writes it."""
        rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in ANSWERS.items()]  # fmt: skip
        (self.folder / "chats.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows * 200)
        )
        (self.folder / "base.py").write_text(BASE.format(told=TOLD, config=FAMILIES[family]))
        self.run(sys.executable, "base.py", shown="python base.py   # transformers writes ./base")


def transcript(folder: Path, interpreters: list[str]) -> str:
    """What is typed and printed."""
    shell = Shell(folder)
    shell.begin("llama")
    shell.run("ls", "base")
    settings = [word for setting in SETTINGS.split() for word in ("--set", setting)]
    written = shell.memconsole("plan", *settings, "--toml", only="^never$")
    (folder / "plan.toml").write_text(written)
    shell.lines[-2] = (
        f"$ memconsole plan {SETTINGS.replace(' ', ' --set ').join(('--set ', ''))} --toml > plan.toml"
    )
    shell.memconsole("plan", "--plan", "plan.toml", only="base  |fine-tunes|^8 x|^peak|^fits")
    shell.memconsole("train", "--plan", "plan.toml", only="fine-tunes .|trainable|^step .*valid|^checkpoint at|Best|TRAINING")  # fmt: skip
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


def table(folder: Path, interpreters: list[str]) -> str:
    """For each family, kind of training and kind of export: what each version generates, beside `memconsole`."""
    rows = ["| model | trained | exported as | generated by | same text as memconsole | stopped by itself |", "| --- | --- | --- | --- | ---: | ---: |"]  # fmt: skip
    for family in FAMILIES:
        into = folder / family
        into.mkdir()
        shell = Shell(into)
        shell.begin(family)
        for kind, changed in (("whole", ("lora_rank=0", "learning_rate=0.002")), ("LoRA", ())):
            words = [word for setting in SETTINGS.split() for word in ("--set", setting)]
            for change in changed:
                section = "optimize" if "lora" in change else "train"
                words += ["--set", f"{section}.{change}"]
            shell.memconsole("train", *words)
            own = shell.memconsole("chat", "latest", "--temperature", "0", typed="\n/forget\n".join(ANSWERS))  # fmt: skip
            text = shell.memconsole("sample", "latest", "--prompt", PROMPT, "--temperature", "0", "--tokens", str(TOKENS))  # fmt: skip
            for form in ("huggingface", "peft")[: 1 + (kind == "LoRA")]:
                out = f"{kind}-{form}"
                shell.memconsole("export", "latest", out, "--format", form)
                for python in interpreters:
                    row = compared(shell, python, out, form == "peft", own.splitlines(), text)
                    form_word = "adapters" if form == "peft" else "a whole model"
                    rows += [f"| {family} | {kind} | {form_word} | {row}"] if row else []
                    print(rows[-1], file=sys.stderr, flush=True)
    return "\n".join(rows)


def compared(shell: Shell, python: str, out: str, adapters: bool, own: list[str], text: str) -> str:
    """What transformers (with `adapters`: and PEFT) of an interpreter generates, beside `own` answers and `text`;
    nothing if it has no PEFT."""
    version = subprocess.run(
        [python, "-c", "import peft; print(peft.__version__)"], capture_output=True, text=True
    )
    if adapters and version.returncode:
        return ""
    chats = [[{"role": "user", "content": question}] for question in ANSWERS]
    asked = {"directory": out, "prompts": [PROMPT], "chats": chats, "tokens": TOKENS}
    asked |= {"base": "base"} if adapters else {}
    found = json.loads(shell.run(python, str(ROUND_TRIP), typed=json.dumps(asked)).splitlines()[-1])
    with_peft = f", PEFT {version.stdout.strip()}" if adapters else ""
    theirs = [*(answer for answer, _ in found["answers"]), found["texts"][0][0].strip()]
    same = sum(a == b for a, b in zip(theirs, [*own, text.strip()], strict=True))
    ended = sum(ended for _, ended in found["answers"])
    return f"transformers {found['version']}{with_peft} | {same} of {len(theirs)} | {ended} of {len(ANSWERS)} answers |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into the page")
    parser.add_argument("--families", action="store_true", help="the table of versions instead")
    options = parser.parse_args()
    make = table if options.families else transcript
    others = os.environ.get("MEMCONSOLE_TRANSFORMERS", "").split(os.pathsep)
    with tempfile.TemporaryDirectory() as folder:
        found = make(Path(folder), [sys.executable, *filter(None, others)])
    print(found)
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        begin, end, shown = (TABLE_BEGIN, TABLE_END, found) if options.families else (BEGIN, END, f"```\n{found}\n```")  # fmt: skip
        before, after = text[: text.index(begin)], text[text.index(end) :]
        PAGE.write_text(f"{before}{begin}\n{shown}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
