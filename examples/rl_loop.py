"""Reinforcement learning in a loop of your own: rollouts, log-probabilities, updates.

torchrun --nproc-per-node 4 examples/rl_loop.py  # 2 groups of 2 ranks share the answers
torchrun --nproc-per-node 1 examples/rl_loop.py  # one process prints the same numbers
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig, set_seed

import deepsp
from deepsp.integrations.transformers import register

VOCABULARY, PROMPTS, ANSWERS, STEPS = 97, 4, 4, 3
CLIP, BETA, ALPHA, LEARNING_RATE = 0.2, 0.04, 0.01, 1e-2

dist.init_process_group("gloo")
torch.set_num_threads(1)
size = min(2, dist.get_world_size())  # the ranks that share a sequence
mesh = init_device_mesh(
    "cpu", (dist.get_world_size() // size, size), mesh_dim_names=("data", "seq")
)
group, data = mesh["seq"].get_group(), mesh["data"].get_group()
first = dist.get_global_rank(group, 0)

register(group)  # attn_implementation="deepsp" attends over the group
set_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=VOCABULARY, **sizes, num_attention_heads=4, num_key_value_heads=2)
made = [AutoModelForCausalLM.from_config(config, attn_implementation="deepsp") for _ in range(2)]
policy, reference = (model.double() for model in made)
optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE)


def rollout(prompts: list[list[int]], step: int) -> list[dict]:
    """Stands for a request to vLLM or SGLang: answers, and the sampler's log-probabilities."""
    rows = []
    for prompt in prompts:
        draw = torch.Generator().manual_seed(1000 * step + sum(prompt))
        for _ in range(ANSWERS):
            length = int(torch.randint(20, 60, (1,), generator=draw))
            answer = torch.randint(VOCABULARY, (length,), generator=draw)
            sampled = -4.6 + 0.2 * torch.randn(length, generator=draw, dtype=torch.float64)
            rows.append({"prompt": prompt, "answer": answer.tolist(), "sampled": sampled.tolist()})
    return rows


def score(model, batch):
    """Log-probabilities and entropies of this rank's tokens."""
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask")}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    ids = batch["shift_labels"]
    return deepsp.token_log_probs(hidden, model.lm_head.weight, ids, entropy=True)


for step in range(STEPS):
    prompts = [[5 + step, 7 + i, 11 * i % 90] for i in range(PROMPTS)]
    prompts = prompts[mesh.get_local_rank("data") :: mesh["data"].size()]  # those of this group
    # One rank of a group asks; its answers are those of all.
    rows = [rollout(prompts, step) if dist.get_rank() == first else None]
    dist.broadcast_object_list(rows, first, group)
    rewards = torch.tensor([sum(row["answer"]) % 7 / 7 for row in rows[0]]).double()
    rewards = rewards.view(-1, ANSWERS)
    advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)

    def padded(value, rows=rows):
        return pad_sequence([torch.tensor(value(row)) for row in rows[0]], batch_first=True)

    ids = padded(lambda row: row["prompt"] + row["answer"])
    answered = padded(lambda row: [0] * len(row["prompt"]) + [1] * len(row["answer"]))
    full = {
        "input_ids": ids,
        "attention_mask": padded(lambda row: [1] * (len(row["prompt"]) + len(row["answer"]))),
        "labels": ids.masked_fill(answered == 0, -100),
        "sampled": padded(lambda row: [0.0] * len(row["prompt"]) + row["sampled"]),
        "advantage": advantages.view(-1, 1).expand(ids.shape),
    }
    beside_labels = {"sampled": "label_weights", "advantage": "label_weights"}
    batch, _ = deepsp.shard_batch(full, group, roles=beside_labels)

    with torch.no_grad():
        of_reference, _ = score(reference, batch)
    log_probs, entropy = score(policy, batch)
    ratio = (log_probs - batch["sampled"]).exp()
    gain = torch.min(
        ratio * batch["advantage"], ratio.clamp(1 - CLIP, 1 + CLIP) * batch["advantage"]
    )
    distance = of_reference - log_probs
    each = -gain + BETA * (distance.exp() - distance - 1) - ALPHA * entropy

    # A sum over the group's tokens, divided by those of all groups.
    count = answered.sum().double()
    dist.all_reduce(count, group=data)
    loss = deepsp.token_sum(each, batch["shift_labels"], group) / count
    loss.backward()
    deepsp.sync_gradients(policy, dist.group.WORLD)
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total, group=data)
    if dist.get_rank() == 0:
        print(f"step {step}: loss {total:.10f}, gradient norm {norm:.10f}", flush=True)

dist.destroy_process_group()
