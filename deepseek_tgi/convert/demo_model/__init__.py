"""How the bundled model `demo` was made: from word lists to a checkpoint, each stage a command.

1. `python -m deepseek_tgi.convert.demo_model.write_text GGUF TEXTS --seconds 280 --count 680000 --seed 7`: the small
   real model, on a GPU, answers prompts that `prompts` makes of `words`.
2. `python -m deepseek_tgi.convert.demo_model.pack TEXTS DATA --prompts 680000 --seed 7 --own 900000`: sieves those
   answers (`filters`), adds documents from our own tables and plots (`facts`, `definitions`, `stories`, `dialogues`),
   trains the tokenizer and writes token files; 1 % of the documents is held out, by kind.
3. `python -m deepseek_tgi.convert.demo_model.train DATA OUT --seconds 540`: trains `model` and writes a checkpoint that
   transformers loads as DeepSeek-V3.
4. `deepseek-tgi quantize OUT PACKED --group-size 32`: the AWQ checkpoint that the package carries.

Knows nothing of serving. Stages 1 and 3 want an NVIDIA GPU and Triton, which the package itself does not need.
"""
