torchrun --nnodes=$SLURM_NTASKS --node_rank=$SLURM_NODEID --nproc_per_node=8 \
    main_training.py --model_variant=llama3_70b --data_path=/data --datasets=web --weights=1 \
    --file_type=arrow --col_name=tokens --eos_token=128001 --bos_token=None \
    --sharding_strategy=fsdp --fsdp_activation_checkpointing=True --selective_checkpointing=0.5 \
    --batch_size=1 --num_steps=250000 --learning_rate=1.5e-4 --grad_clip_thresh=0.8 \
    --num_workers=1 --profiler_rank0_only=True --tracker=wandb --tracker_project_name=llama
