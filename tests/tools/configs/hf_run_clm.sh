python run_clm.py \
    --model_type gpt2 --tokenizer_name openai-community/gpt2 \
    --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 \
    --per_device_train_batch_size 8 --per_device_eval_batch_size 8 \
    --do_train --do_eval --max_steps 2000 --warmup_ratio 0.03 --bf16 \
    --fsdp "full_shard auto_wrap" --report_to none --output_dir /tmp/test-clm
