"""Triton kernels of the corpus: compiled without torch and without a GPU, as `tests/ptx_tools/corpus.py` says."""

# ruff: noqa: B007, E741, RUF059
import triton
import triton.language as tl


@triton.jit
def k_add(x_ptr, y_ptr, o_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    m = offs < n
    tl.store(o_ptr + offs, tl.load(x_ptr + offs, mask=m) + tl.load(y_ptr + offs, mask=m), mask=m)


@triton.jit
def k_softmax(o_ptr, x_ptr, xs, os, n_rows, n_cols, BLOCK: tl.constexpr):
    row0 = tl.program_id(0)
    step = tl.num_programs(0)
    for row in tl.range(row0, n_rows, step):
        c = tl.arange(0, BLOCK)
        m = c < n_cols
        r = tl.load(x_ptr + row * xs + c, mask=m, other=-float("inf"))
        r = r - tl.max(r, axis=0)
        e = tl.exp(r)
        tl.store(o_ptr + row * os + c, e / tl.sum(e, axis=0), mask=m)


@triton.jit
def k_layernorm(X, Y, W, B, Mean, Rstd, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    X += row * stride
    Y += row * stride
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, N, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        acc += tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.sum(acc, axis=0) / N
    var = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, N, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.where(cols < N, x - mean, 0.0)
        var += x * x
    rstd = 1 / tl.sqrt(tl.sum(var, axis=0) / N + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for off in range(0, N, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        m = cols < N
        x = tl.load(X + cols, mask=m, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * tl.load(W + cols, mask=m) + tl.load(B + cols, mask=m)
        tl.store(Y + cols, y, mask=m)


@triton.jit
def k_matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    sam,
    sak,
    sbk,
    sbn,
    scm,
    scn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GM: tl.constexpr,
):
    pid = tl.program_id(0)
    npm = tl.cdiv(M, BM)
    npn = tl.cdiv(N, BN)
    nig = GM * npn
    gid = pid // nig
    first = gid * GM
    gs = min(npm - first, GM)
    pm = first + ((pid % nig) % gs)
    pn = (pid % nig) // gs
    om = (pm * BM + tl.arange(0, BM)) % M
    on = (pn * BN + tl.arange(0, BN)) % N
    ok = tl.arange(0, BK)
    a = a_ptr + om[:, None] * sam + ok[None, :] * sak
    b = b_ptr + ok[:, None] * sbk + on[None, :] * sbn
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(tl.cdiv(K, BK)):
        av = tl.load(a, mask=ok[None, :] < K - k * BK, other=0.0)
        bv = tl.load(b, mask=ok[:, None] < K - k * BK, other=0.0)
        acc = tl.dot(av, bv, acc)
        a += BK * sak
        b += BK * sbk
    cm = pm * BM + tl.arange(0, BM)
    cn = pn * BN + tl.arange(0, BN)
    tl.store(c_ptr + scm * cm[:, None] + scn * cn[None, :], acc.to(tl.float16), mask=(cm[:, None] < M) & (cn[None, :] < N))


@triton.jit
def k_matmul_tma_host(a_desc, b_desc, c_desc, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pid = tl.program_id(0)
    npm = tl.cdiv(M, BM)
    pm = pid % npm
    pn = pid // npm
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(tl.cdiv(K, BK)):
        a = a_desc.load([pm * BM, k * BK])
        b = b_desc.load([pn * BN, k * BK])
        acc = tl.dot(a, b.T, acc)
    c_desc.store([pm * BM, pn * BN], acc.to(tl.float16))


@triton.jit
def k_matmul_tma_dev(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NSM: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(a_ptr, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    b_desc = tl.make_tensor_descriptor(b_ptr, shape=[N, K], strides=[K, 1], block_shape=[BN, BK])
    c_desc = tl.make_tensor_descriptor(c_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    npm = tl.cdiv(M, BM)
    npn = tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), npm * npn, NSM, flatten=True):
        pm = t % npm
        pn = t // npm
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(tl.cdiv(K, BK)):
            a = a_desc.load([pm * BM, k * BK])
            b = b_desc.load([pn * BN, k * BK])
            acc = tl.dot(a, b.T, acc)
        c_desc.store([pm * BM, pn * BN], acc.to(tl.float16))


@triton.jit
def k_matmul_ws(a_desc, b_desc, c_desc, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NSM: tl.constexpr):
    npm = tl.cdiv(M, BM)
    npn = tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), npm * npn, NSM, warp_specialize=True):
        pm = t % npm
        pn = t // npm
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(tl.cdiv(K, BK)):
            a = a_desc.load([pm * BM, k * BK])
            b = b_desc.load([pn * BN, k * BK])
            acc = tl.dot(a, b.T, acc)
        c_desc.store([pm * BM, pn * BN], acc.to(tl.float16))


@triton.jit
def k_flash(
    Q,
    K,
    V,
    O,
    L,
    sm_scale,
    sqz,
    sqm,
    skz,
    skn,
    svz,
    svn,
    soz,
    som,
    N_CTX,
    BM: tl.constexpr,
    BN: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    pm = tl.program_id(0)
    z = tl.program_id(1)
    om = pm * BM + tl.arange(0, BM)
    on = tl.arange(0, BN)
    od = tl.arange(0, D)
    q = tl.load(Q + z.to(tl.int64) * sqz + om[:, None] * sqm + od[None, :], mask=om[:, None] < N_CTX, other=0.0)
    kp = K + z.to(tl.int64) * skz + on[None, :] * skn + od[:, None]
    vp = V + z.to(tl.int64) * svz + on[:, None] * svn + od[None, :]
    m_i = tl.zeros([BM], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BM], dtype=tl.float32) + 1.0
    acc = tl.zeros([BM, D], dtype=tl.float32)
    hi = N_CTX
    if CAUSAL:
        hi = min((pm + 1) * BM, N_CTX)
    for s in range(0, hi, BN):
        k = tl.load(kp + s * skn, mask=(s + on)[None, :] < N_CTX, other=0.0)
        qk = tl.dot(q, k) * (sm_scale * 1.44269504)
        qk = tl.where((s + on)[None, :] < N_CTX, qk, float("-inf"))
        if CAUSAL:
            qk = tl.where(om[:, None] >= (s + on)[None, :], qk, float("-inf"))
        m_n = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.math.exp2(qk - m_n[:, None])
        al = tl.math.exp2(m_i - m_n)
        l_i = l_i * al + tl.sum(p, 1)
        acc = acc * al[:, None]
        v = tl.load(vp + s * svn, mask=(s + on)[:, None] < N_CTX, other=0.0)
        acc = tl.dot(p.to(tl.float16), v, acc)
        m_i = m_n
    acc = acc / l_i[:, None]
    tl.store(L + z * N_CTX + om, m_i + tl.math.log2(l_i), mask=om < N_CTX)
    tl.store(O + z.to(tl.int64) * soz + om[:, None] * som + od[None, :], acc.to(tl.float16), mask=om[:, None] < N_CTX)


@triton.jit
def k_flash_varlen(Q, K, V, O, cu, sm_scale, sm, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    pm = tl.program_id(0)
    z = tl.program_id(1)
    s0 = tl.load(cu + z)
    s1 = tl.load(cu + z + 1)
    n = s1 - s0
    if pm * BM >= n:
        return
    om = pm * BM + tl.arange(0, BM)
    on = tl.arange(0, BN)
    od = tl.arange(0, D)
    q = tl.load(Q + (s0 + om[:, None]) * sm + od[None, :], mask=om[:, None] < n, other=0.0)
    acc = tl.zeros([BM, D], dtype=tl.float32)
    for s in range(0, n, BN):
        k = tl.load(K + (s0 + s + on[None, :]) * sm + od[:, None], mask=(s + on)[None, :] < n, other=0.0)
        p = tl.dot(q, k) * sm_scale
        v = tl.load(V + (s0 + s + on[:, None]) * sm + od[None, :], mask=(s + on)[:, None] < n, other=0.0)
        acc = tl.dot(p.to(tl.float16), v, acc)
    tl.store(O + (s0 + om[:, None]) * sm + od[None, :], acc.to(tl.float16), mask=om[:, None] < n)


@triton.jit
def k_atomics(x_ptr, o_ptr, cnt_ptr, lock_ptr, h_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    m = offs < n
    x = tl.load(x_ptr + offs, mask=m, other=0.0)
    tl.atomic_add(o_ptr + (offs % 128), x, mask=m)
    tl.atomic_max(cnt_ptr, pid)
    tl.atomic_add(h_ptr + offs, x.to(tl.float16), mask=m, sem="relaxed")
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    c = tl.load(cnt_ptr + 1)
    tl.store(cnt_ptr + 1, c + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def k_gather(idx_ptr, w_ptr, o_ptr, n_idx, D, BD: tl.constexpr):
    r = tl.program_id(0)
    i = tl.load(idx_ptr + r)
    c = tl.arange(0, BD)
    m = c < D
    tl.store(o_ptr + r * D + c, tl.load(w_ptr + i * D + c, mask=m), mask=m)


@triton.jit
def k_scatter(idx_ptr, x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = offs < n
    i = tl.load(idx_ptr + offs, mask=m, other=0)
    x = tl.load(x_ptr + offs, mask=m)
    tl.store(o_ptr + i, x, mask=m & (i >= 0))


@triton.jit
def k_inductor_where(in_ptr0, in_ptr1, in_ptr2, out_ptr0, ks0, xnumel, XBLOCK: tl.constexpr):
    # in the style of torch._inductor: index_select with wrap-around, bounds assert, dynamic size
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex % ks0
    x1 = xindex // ks0
    tmp0 = tl.load(in_ptr0 + (x1), xmask, eviction_policy="evict_last")
    tmp1 = tl.full([XBLOCK], 1000, tl.int32)
    tmp2 = tmp0 + tmp1
    tmp3 = tmp0 < 0
    tmp4 = tl.where(tmp3, tmp2, tmp0)
    tl.device_assert(((tmp4 >= 0) & (tmp4 < 1000)) | ~(xmask), "index out of bounds: 0 <= tmp4 < 1000")
    tmp6 = tl.load(in_ptr1 + (x0 + ks0 * tmp4), xmask)
    tmp7 = tl.load(in_ptr2 + (x0), xmask, eviction_policy="evict_last")
    tl.store(out_ptr0 + (xindex), tmp6 + tmp7, xmask)


@triton.jit
def k_inductor_red(in_ptr0, in_ptr1, out_ptr0, out_ptr1, xnumel, r0_numel, XBLOCK: tl.constexpr, R0_BLOCK: tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    x0 = xindex
    _t = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0 = r0_offset + r0_base
        rm = r0 < r0_numel
        v = tl.load(in_ptr0 + (r0 + r0_numel * x0), rm & xmask, eviction_policy="evict_first", other=0.0).to(tl.float32)
        w = tl.load(in_ptr1 + r0, rm, eviction_policy="evict_last", other=0.0)
        _t = tl.where(rm & xmask, _t + v * w, _t)
    t = tl.sum(_t, 1)[:, None]
    tl.store(out_ptr0 + x0, t, xmask)
    a, i = tl.max(_t, 1, return_indices=True)
    tl.store(out_ptr1 + x0, i[:, None].to(tl.int64), xmask)


@triton.jit
def k_dropout(x_ptr, seed_ptr, o_ptr, n, p, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = offs < n
    seed = tl.load(seed_ptr + 3)
    r = tl.rand(seed, offs)
    x = tl.load(x_ptr + offs, mask=m)
    tl.store(o_ptr + offs, tl.where(r > p, x / (1 - p), 0.0), mask=m)


@triton.jit
def k_masked_by_data(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = offs < n
    x = tl.load(x_ptr + offs, mask=m, other=0.0)
    tl.store(o_ptr + offs, x, mask=m & (x > 0))


@triton.jit
def k_loaded_bound(x_ptr, len_ptr, o_ptr, stride, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    n = tl.load(len_ptr + r)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for s in range(0, n, BLOCK):
        c = s + tl.arange(0, BLOCK)
        acc += tl.load(x_ptr + r * stride + c, mask=c < n, other=0.0)
    tl.store(o_ptr + r, tl.sum(acc, 0))


@triton.jit
def k_grouped_gemm(pa, pb, pc, sizes, G, NSM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    # pointers are themselves loaded from memory
    t = tl.program_id(0)
    last = 0
    for g in range(G):
        gm = tl.load(sizes + g * 3)
        gn = tl.load(sizes + g * 3 + 1)
        gk = tl.load(sizes + g * 3 + 2)
        nm = tl.cdiv(gm, BM)
        nn = tl.cdiv(gn, BN)
        nt = nm * nn
        while t >= last and t < last + nt:
            a_ptr = tl.load(pa + g).to(tl.pointer_type(tl.float16))
            b_ptr = tl.load(pb + g).to(tl.pointer_type(tl.float16))
            c_ptr = tl.load(pc + g).to(tl.pointer_type(tl.float16))
            tt = t - last
            om = (tt // nn) * BM + tl.arange(0, BM)
            on = (tt % nn) * BN + tl.arange(0, BN)
            ok = tl.arange(0, BK)
            a = a_ptr + om[:, None] * gk + ok[None, :]
            b = b_ptr + ok[:, None] * gn + on[None, :]
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            for kk in range(tl.cdiv(gk, BK)):
                acc += tl.dot(tl.load(a), tl.load(b))
                a += BK
                b += BK * gn
            tl.store(c_ptr + om[:, None] * gn + on[None, :], acc.to(tl.float16))
            t += NSM
        last = last + nt


@triton.jit
def k_inline_asm(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = offs < n
    x = tl.load(x_ptr + offs, mask=m)
    y = tl.inline_asm_elementwise(
        "{ .reg .b32 t<4>; .reg .pred p;\n setp.gt.u32 p, $1, 17; @p add.u32 t0, $1, 1; @!p mov.b32 t0, $1; mov.u32 $0, t0; }",
        "=r,r",
        [x],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    tl.store(o_ptr + offs, y, mask=m)


@triton.jit
def k_print_sort_hist(x_ptr, o_ptr, h_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0)
    tl.device_print("x", x)
    s = tl.sort(x)
    tl.store(o_ptr + offs, tl.cumsum(s, 0), mask=offs < n)
    tl.store(h_ptr + tl.arange(0, 64), tl.histogram(x & 63, 64))


@triton.jit
def k_splitk_semaphore(a_ptr, ws_ptr, sem_ptr, o_ptr, n, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    # last-arriving block reduces (data dependent on arrival order, footprint of union is not)
    p = tl.program_id(0)
    s = tl.program_id(1)
    offs = p * BLOCK + tl.arange(0, BLOCK)
    m = offs < n
    v = tl.load(a_ptr + s * n + offs, mask=m, other=0.0)
    tl.store(ws_ptr + s * n + offs, v, mask=m)
    tl.debug_barrier()
    t = tl.atomic_add(sem_ptr + p, 1, sem="acq_rel")
    if t == SPLIT - 1:
        acc = tl.zeros([BLOCK], dtype=tl.float32)
        for i in range(SPLIT):
            acc += tl.load(ws_ptr + i * n + offs, mask=m, other=0.0, volatile=True)
        tl.store(o_ptr + offs, acc, mask=m)
