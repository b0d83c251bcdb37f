#!/bin/bash
# the documented flags of upstream fms-fsdp for its 7b
MODEL_ARGS="\
--model_variant=7b
--ckpt_load_path=/output/ckpt
--ckpt_save_path=/output/ckpt
--use_dummy_dataset=False
--data_path=/data
--seq_length=4096
--sep_token=1
--datasets=web,code
--weights=4,1
--logical_shards=1024
--sharding_strategy=HSDP
--mixed_precision=True
--fsdp_activation_checkpointing=True
--selective_checkpointing=1
--low_cpu_fsdp=True
--seed=2023
--batch_size=2
--num_steps=1000000
--learning_rate=3e-4
--use_profiler=False
--report_interval=200
--checkpoint_interval=20000
--use_torch_compile=False
"
torchrun --nnodes=16 --nproc_per_node=8 main_training.py ${MODEL_ARGS}
