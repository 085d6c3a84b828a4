"""Which program makes which tile, and the masks at edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tiles
from pallas_kernels.blocks import Blocks


def order(m, n, group):
    """(row, column) of each program's tile in 16×16 tiles."""
    blocks = Blocks(16, 16, 16, group=group)
    programs = jnp.arange(-(-m // 16) * -(-n // 16), dtype=jnp.int32)
    rows, columns = jax.vmap(lambda program: tiles.order(program, m, n, blocks))(programs)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def test_rows_of_a_group_are_made_column_by_column():
    assert order(48, 32, group=2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(("m", "n"), [(16, 16), (100, 40), (112, 33), (1, 90)])
def test_every_tile_is_made_once(m, n, group):
    assert sorted(order(m, n, group)) == list(np.ndindex(-(-m // 16), -(-n // 16)))


def test_a_mask_is_there_only_where_it_can_be_false():
    assert tiles.span(1, 16, 32).inside is None
    assert tiles.span(1, 16, 20).inside.tolist() == [True] * 4 + [False] * 12
    # Three parts of a sum over 40 numbers cover 48.
    assert tiles.span(1, 16, 40, covered=40).inside is None
    assert tiles.span(2, 16, 32, covered=48).inside.tolist() == [False] * 16


def test_masks_that_are_not_there_are_true():
    mask = jnp.array([True, False])
    assert tiles.both(None, None) is None
    assert tiles.both(mask, None) is tiles.both(None, mask) is mask
    crossed = tiles.both(tiles.as_column(mask), tiles.as_row(mask))
    assert crossed.tolist() == [[True, False], [False, False]]
    assert tiles.as_row(None) is tiles.as_column(None) is tiles.spread(None, (2, 2)) is None
    assert tiles.spread(tiles.as_row(mask), (2, 2)).tolist() == [[True, False]] * 2


def test_negative_positions_are_not_under_a_limit():
    positions = jnp.array([-(2**30), -1, 0, 4, 5], jnp.int32)
    assert tiles.under(positions, 5).tolist() == [False, False, True, True, False]
