"""`python -m card_megatron …` and `torchrun -m card_megatron …`: the same as `card …`."""

from card_megatron.cli import main

if __name__ == "__main__":
    main()
