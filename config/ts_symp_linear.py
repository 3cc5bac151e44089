# Linear SympFormers on TinyStories: the setting of Table 2 [SYMP, app. B]. --template=... picks the integrator.
dataset = "tinystories"

template = "presymp_etd_ab2"
attention = "linear"
n_layer = 4
n_head = 4
n_embd = 64
block_size = 128
h0_first_order = 0.25
h0_second_order = 0.01

step_sequences = 72
batch_size = 6
max_steps = 10_000
optimizer = "adamw"
learning_rate = 3e-4
scalar_lr = 3e-2                    # 100 times the rest
warmup_steps = 150
min_lr_ratio = 0.4

eval_interval = 100
eval_sequences = 120
