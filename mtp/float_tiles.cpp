// Products of floats that lie as tiles of 16 outputs, [outputs / 16, inputs, 16 outputs]. Included by kernel.cpp.
//
// An output is a lane of its own, so nothing has to be added across a register at the end of a row, and some tokens are
// summed while the weights pass once: eight of them hide behind what reading takes.

constexpr int64_t TILE = 16;                      // outputs
constexpr int SIDE = 2, GROUP = V == 16 ? 14 : 6;  // registers of outputs, and tokens, whose sums are kept in registers
constexpr int64_t RUN_LENGTH = 256;               // inputs that are added one after the other; then such sums are
constexpr int64_t DISTANCE = 64;                  // inputs ahead of their use that a tile is fetched

// y[m, j] = x[m] . weight[j] + bias[j] + add[m, j] for M tokens and R registers of outputs from `row` on.
template <int M, int R, bool FIRST>
static inline void columns(const Matrix& a, const float* x, const float* add, float* y, int64_t row) {
    const int64_t n = a.inputs;
    const float* w = (const float*)a.weight + row / TILE * TILE * n + row % TILE;
    const auto place = [=](int r) { return r * V / TILE * TILE * n + r * V % TILE; };
    for (int64_t first = 0; first < n; first += RUN_LENGTH) {
        const int64_t last = first + RUN_LENGTH < n ? first + RUN_LENGTH : n;
        vec parts[M][R] = {};
        for (int64_t i = first; i < last; i++) {
            vec part[R];
            for (int r = 0; r < R; r++) {
                part[r] = load(w + place(r) + i * TILE);
                if (FIRST) __builtin_prefetch(w + place(r) + (i + DISTANCE) * TILE, 0, 2);
            }
            for (int m = 0; m < M; m++) {
                const vec number = all(x[m * n + i]);
                for (int r = 0; r < R; r++) parts[m][r] += part[r] * number;
            }
        }
        for (int m = 0; m < M; m++)
            for (int r = 0; r < R; r++) {
                const int64_t to = m * a.outputs + row + r * V;
                vec total = first ? load(y + to) + parts[m][r] : parts[m][r];
                if (last == n && a.bias) total += load(a.bias + row + r * V);
                if (last == n && add) total += load(add + to);
                store(y + to, total);
            }
    }
}

// `count` <= M tokens
template <int R, bool FIRST, int M = GROUP>
static inline void some_columns(int64_t count, const Matrix& a, const float* x, const float* add, float* y, int64_t row) {
    if (count == M)
        columns<M, R, FIRST>(a, x, add, y, row);
    else if constexpr (M > 1)
        some_columns<R, FIRST, M - 1>(count, a, x, add, y, row);
}

// R registers of outputs for all tokens; the first of them bring the weights in, the others find them in the cache.
template <int R>
static inline void all_columns(const Matrix& a, int64_t tokens, const float* x, const float* add, float* y, int64_t row) {
    for (int64_t m = 0; m < tokens; m += GROUP) {
        const int64_t count = tokens - m < GROUP ? tokens - m : GROUP;
        const float *from = x + m * a.inputs, *plus = add ? add + m * a.outputs : nullptr;
        if (m == 0)
            some_columns<R, true>(count, a, from, plus, y, row);
        else
            some_columns<R, false>(count, a, from, plus, y + m * a.outputs, row);
    }
}

// As `multiply` of rows.
static void multiply_columns(const Matrix& a, int64_t tokens, const float* x, const float* add, float* y) {
    const Share mine(a.outputs, UNIT);
    int64_t row = mine.first;
    for (; row + SIDE * V <= mine.last; row += SIDE * V) all_columns<SIDE>(a, tokens, x, add, y, row);
    for (; row < mine.last; row += V) all_columns<1>(a, tokens, x, add, y, row);
}
