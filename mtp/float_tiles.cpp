// Products of floats that lie as tiles of 16 outputs, [outputs / 16, inputs, 16 outputs]. Included by kernel.cpp.
//
// An output is a lane of its own, so nothing has to be added across a register at the end of a row, and some tokens are
// summed while the weights pass once: eight of them hide behind what reading takes.

constexpr int64_t TILE = 16;         // outputs
constexpr int64_t RUN_LENGTH = 256;  // inputs that are added one after the other; then such sums are
constexpr int64_t DISTANCE = 64;     // inputs ahead of their use that a tile is fetched

struct Lanes {
    static constexpr int TOKENS = V == 16 ? 14 : 6, SIDE = 2;  // whose sums, for so many registers of outputs, are in registers
    const float *weight, *bias;  // bias [outputs] or null
    int64_t outputs, inputs;
};

// y[m, j] = x[m] . weight[j] + bias[j] + add[m, j] for M tokens and R registers of outputs from `row` on.
template <int M, int R, bool FIRST>
static inline void block(const Lanes& a, const float* x, const float* add, float* y, int64_t row) {
    const int64_t n = a.inputs;
    const float* w = a.weight + row / TILE * TILE * n + row % TILE;
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

// As `multiply` of rows.
static void multiply(const Lanes& a, int64_t tokens, const float* x, const float* add, float* y) {
    const Share mine(a.outputs, UNIT);
    int64_t row = mine.first;
    for (; row + Lanes::SIDE * V <= mine.last; row += Lanes::SIDE * V) groups<Lanes::SIDE>(a, tokens, x, add, y, row);
    for (; row < mine.last; row += V) groups<1>(a, tokens, x, add, y, row);
}
