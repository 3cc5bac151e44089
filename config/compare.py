# A small setting to compare templates in: four minutes and more a run on one CPU core. See analyze.py compare.
dataset = "kjv"

n_layer = 4
n_head = 4
n_embd = 64
block_size = 128

step_sequences = 16
batch_size = 16
max_steps = 3000
warmup_steps = 100
learning_rate = 2e-3
dtype = "float32"

eval_interval = 100
eval_sequences = 640
