# Triple momentum on the bytes of the King James Bible: some two minutes on two CPU cores.
dataset = "kjv"

template = "tmm"
n_layer = 4
n_head = 4
n_embd = 128
block_size = 256

step_sequences = 8
batch_size = 8
max_steps = 700
warmup_steps = 50
learning_rate = 2e-3

eval_interval = 100
eval_sequences = 160
sample_tokens = 400
