"""Messages of the symm_mem engine with known contents, checked on the device: many rounds, no host in between."""

import torch

from tests.common.symm_mem_cases import Case, Ranks


class Rounds:
    """Rounds of one dispatch and one combine in which every element is known; wrong ones are counted on the device."""

    def __init__(self, case: Case, device: str = "cuda") -> None:
        self.case, self.device = case, device
        self.ranks = Ranks(case, device)
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        self.num_wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.mix = torch.tensor([[3, 11, 17]], device=device)

    def message(self, rank):
        """Ids, rows and probabilities of a rank: each token carries its code everywhere, some go nowhere."""
        case, none = self.case, self.case.experts * len(self.case.tokens)
        tokens = torch.arange(case.tokens[rank], device=self.device)
        code = ((tokens * 31 + rank * 7 + self.number * 13) % 251).float()
        mix = (tokens[:, None] * 7919 + self.number * 104729 + rank * 31 + self.mix) % 1009
        chosen = torch.where(mix % 5 < self.number % 6, (mix // 7) % none, none).sort(dim=1).values
        repeated = torch.zeros_like(chosen, dtype=torch.bool)
        repeated[:, 1:] = chosen[:, 1:] == chosen[:, :-1]
        chosen = chosen.masked_fill(repeated, none).sort(dim=1).values
        ids = chosen.masked_fill(chosen == none, -1).int()
        hidden = code[:, None].expand(-1, case.width).to(torch.bfloat16).contiguous()
        return ids, hidden, code[:, None].expand(-1, case.topk).contiguous()

    def run(self):
        """One round."""
        case, ranks = self.case, self.ranks
        ids, hidden, probs = zip(*(self.message(rank) for rank in range(len(case.tokens))), strict=True)
        exchanges = ranks.exchanges(case, ids)
        sent = ranks.dispatch(exchanges, hidden, probs)
        received = []
        for (rows, row_probs), exchange in zip(sent, exchanges, strict=True):
            is_row = torch.arange(case.budget, device=self.device) < exchange.tokens_per_expert.sum()
            self.num_wrong += (is_row & (rows != row_probs[:, None].to(rows.dtype)).any(dim=1)).sum()
            received.append(torch.where(is_row, row_probs, 0).double().sum())
        given = [torch.where(chosen >= 0, p, 0).double().sum() for chosen, p in zip(ids, probs, strict=True)]
        self.num_wrong += (torch.stack(given).sum() != torch.stack(received).sum()).long()
        back = ranks.combine(exchanges, [rows for rows, _ in sent], None)
        for (result, _), x, chosen in zip(back, hidden, ids, strict=True):
            total = torch.zeros_like(x, dtype=torch.float32)
            for rank in range(len(case.tokens)):
                num_rows = (chosen.div(case.experts, rounding_mode="floor") == rank).sum(dim=1, keepdim=True)
                total += (num_rows * x.float()).bfloat16().float()
            self.num_wrong += (result != total.bfloat16()).any(dim=1).sum()
        self.number += 1

    def run_delayed(self, count):
        """Rounds with kernels that only take time on one rank after the other; GPU only."""
        for number in range(count):
            with self.ranks.group.ranks[number % self.ranks.group.size].as_current():
                torch.cuda._sleep(20_000 * (number % 7))
            self.run()
