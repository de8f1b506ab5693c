"""The one function of vLLM that SGLang takes on a CPU without AMX, in plain torch."""


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style):
    """Turn pairs of the heads' elements by their positions' angles, in place."""
    assert is_neox_style
    cos, sin = (part.unsqueeze(1) for part in cos_sin_cache[positions.flatten()].chunk(2, dim=-1))
    half = cos.shape[-1]
    for tensor in (query, key):
        heads = tensor.view(positions.numel(), -1, head_size)
        first, second = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
        heads[..., :half] = (first * cos - second * sin).to(tensor.dtype)
        heads[..., half : 2 * half] = (second * cos + first * sin).to(tensor.dtype)
