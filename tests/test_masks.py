from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_lab.core import masks
from mla_lab.core.errors import InvalidInput

parent_lists = st.integers(1, 70).flatmap(
    lambda n: st.tuples(*[st.integers(-1, t - 1) for t in range(n)])
)
bool_rows = st.integers(1, 70).flatmap(
    lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=5)
)


def bit(mask: torch.Tensor, row: int, column: int) -> bool:
    """One bit by the contract's words: 16 columns a word, least significant first."""
    return bool(int(mask[row, column // 16]) >> (column % 16) & 1)


@given(bool_rows)
def test_each_bit_is_where_the_contract_says(rows):
    visible = torch.tensor(rows)
    mask = masks.pack(visible)
    columns = visible.shape[1]
    assert mask.dtype is torch.uint16
    assert mask.shape == (len(rows), -(-columns // 32) * 2)
    for r, row in enumerate(rows):
        assert [bit(mask, r, c) for c in range(columns)] == row
        assert not any(bit(mask, r, c) for c in range(columns, mask.shape[1] * 16))
    assert torch.equal(masks.unpack(mask, columns), visible)


@given(parent_lists)
def test_a_tree_shows_each_token_its_ancestors(parents):
    visible = masks.tree(parents)
    for token in range(len(parents)):
        ancestors, t = set(), token
        while t >= 0:
            ancestors.add(t)
            t = parents[t]
        assert set(visible[token].nonzero().flatten().tolist()) == ancestors


def test_trees_of_a_batch_at_once():
    parents = [[-1, 0, 1], [-1, -1, 0]]
    assert torch.equal(masks.tree(parents), torch.stack([masks.tree(p) for p in parents]))


def test_a_path_is_a_chain_and_no_tokens_are_no_rows():
    assert torch.equal(masks.tree(range(-1, 39)), masks.chain(40))
    assert masks.tree([]).shape == (0, 0)


def test_words_by_hand():
    assert [masks.words_per_row(n) for n in (1, 32, 33, 64, 65)] == [2, 2, 4, 4, 6]
    mask = masks.pack(masks.chain(33))
    assert mask[32].tolist() == [0xFFFF, 0xFFFF, 1, 0]
    assert mask[16].tolist() == [0xFFFF, 1, 0, 0]


def test_valid_masks_pass():
    masks.validate(masks.pack(torch.stack([masks.chain(5)] * 3)), [5, 5, 5])
    masks.validate(masks.pack_ragged([masks.tree([-1, -1]), masks.chain(4)]), [2, 4])


@pytest.mark.parametrize("column", [5, 31])
def test_a_set_padding_bit_is_named(column):
    visible = torch.zeros(2, 5, 32, dtype=torch.bool)
    visible[1, 3, column] = True
    with pytest.raises(InvalidInput, match=f"bit {column} of row 8"):
        masks.validate(masks.pack(visible), [5, 5])


def test_a_ragged_row_may_not_see_past_its_own_draft():
    visible = torch.zeros(6, 4, dtype=torch.bool)
    visible[1, 2] = True  # request 0 has two draft tokens
    with pytest.raises(InvalidInput, match="bit 2 of row 1"):
        masks.validate(masks.pack(visible), [2, 4])


def test_wrong_masks_are_refused():
    good = masks.pack(torch.stack([masks.chain(5)] * 2))
    with pytest.raises(TypeError, match="uint16"):
        masks.validate(good.to(torch.int32), [5, 5])
    with pytest.raises(InvalidInput, match=r"\(2, 5, 2\)"):
        masks.validate(good[:, :4], [5, 5])
    with pytest.raises(InvalidInput, match="shape"):
        masks.validate(good, [5, 5], max_q_len=33)
    for parents in ([0], [-1, 1], [-2]):
        with pytest.raises(InvalidInput, match="parents"):
            masks.tree(parents)
    with pytest.raises(InvalidInput, match="max_q_len"):
        masks.pack_ragged([masks.chain(4)], 3)


def test_picture_in_text():
    assert masks.picture(masks.tree([-1, 0, 0])) == "#..\n##.\n#.#"
