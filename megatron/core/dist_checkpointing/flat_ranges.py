"""A range of the elements of a flattened tensor as rectangles of the tensor. Pure arithmetic.

    [3, 4], elements 2 to 11:      . . a a        rows that are cut give a box each,
                                   b b b b        whole rows between them one together;
                                   c c c .        more dimensions, the same inside each row

So a tensor of d dimensions needs at most 2 d - 1 boxes, and a checkpoint knows nothing of flat ranges: what a sharded
optimizer writes, any layout reads, and the other way round.
"""

from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes_of_range(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """(offset, size) of rectangles that hold elements `begin` to `end` - 1 of a row-major tensor, in that order."""
    if begin >= end:
        return []
    if len(shape) == 1:
        return [((begin,), (end - begin,))]
    row_size = prod(shape[1:])
    boxes: list[Box] = []
    first, last = -(-begin // row_size), end // row_size  # whole rows: first ... last - 1
    if first > last:
        return _inside_row(shape, last, begin, end)
    if begin < first * row_size:
        boxes += _inside_row(shape, first - 1, begin, first * row_size)
    if first < last:
        boxes.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if last * row_size < end:
        boxes += _inside_row(shape, last, last * row_size, end)
    return boxes


def _inside_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> list[Box]:
    base = row * prod(shape[1:])
    inner = boxes_of_range(shape[1:], begin - base, end - base)
    return [((row, *offset), (1, *size)) for offset, size in inner]
