# Softmax SympFormers on TinyStories: the setting of Table 1 [SYMP, app. B]. --template=... picks the integrator.
dataset = "tinystories"

template = "presymp_etd_ab2"
n_layer = 8
n_head = 8
n_embd = 64
block_size = 512
h0_first_order = 0.1
h0_second_order = 0.1

step_sequences = 96
batch_size = 6
max_steps = 10_000
optimizer = "adamw"
learning_rate = 3e-4
scalar_lr = 3e-4
warmup_steps = 150
min_lr_ratio = 0.4

eval_interval = 100
eval_sequences = 120
