# OpenWebText, 480 sequences of 1024 tokens a step [TMM, D.3]. --template=... picks the sibling.
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024

step_sequences = 480
batch_size = 8
max_steps = 30_000
warmup_steps = 3000
decay_start = 25_000                  # with --schedule=wsd
muon_lr = 0.004
learning_rate = 6e-4
scalar_lr = 3e-3

eval_interval = 100
eval_sequences = 1280
