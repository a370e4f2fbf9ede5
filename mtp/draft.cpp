// Drafting in one call: a head's layers, the output matrix and the choice of tokens, one depth after the other.
//
// Whatever a draft says, the trunk judges it with its own weights. So the weights of heads, and of the output matrix
// where it drafts, are kept as bytes, a quarter of what there is to read. Sums are in float32.
//
// Shapes: B texts, W tokens of each, M = B * W, H hidden size, R rows of the output matrix, C columns read out.
#include "kernel.cpp"

// What makes logits of a state, and which tokens these are about.
struct Output {
    Matrix rows;
    const int64_t* ids;  // [R] tokens, ascending; null: row r is token r
    int64_t token(int64_t row) const { return ids ? ids[row] : row; }
};

// One depth of a head.
struct Stage {
    const float *token_norm, *state_norm;  // of what `project` joins; null where the block reads the state itself
    Matrix project;                  // [token ; state] -> H
    Layer block;
    const float* norm;  // before the output matrix
};

// What a call drafts, and what it works on.
struct Depths {
    int64_t depths;
    const Stage* const* stages;  // by depth
    Run run;                     // x [M, H] is what depth 1 reads; stored is by depth; y [M, H] the last depth's state
    int64_t chained;             // whether a depth reads the one before
    const float* embedding;      // [tokens, H]
    const int64_t* line;         // [B, line_step] texts from the first column's on: depth d = 1, 2, ... reads column + d
    int64_t line_step;
    const int64_t* columns;  // [B, C] columns that are read out, C = 1 where tokens are chosen
    int64_t count;           // C
    Output output;
    float *read, *logits;  // [depths, B, C, H] normed; [depths, B, C, R]
    int64_t* picks;        // [depths, B] the tokens chosen, which are fed on; null: none is
};

// Logits [M, R] of x [M, H]; where `picks` are asked for the best token of each, by every thread in an array of its own.
static void read_out(const Output& a, const Bests& bests, const float* x, float* logits, int64_t* picks) {
    multiply(a.rows, bests.tokens, x, nullptr, logits);
    if (picks) bests.find(logits, a.rows.outputs);
    meet();
    for (int64_t m = 0; picks && m < bests.tokens; m++) picks[m] = a.token(bests.of(logits, a.rows.outputs, m));
}

// A thread's copy of what a draft reads and chooses: nobody waits to be told a token that it can find itself.
struct Line {
    const Depths& draft;
    int64_t size;  // tokens of a text
    Memory<int64_t> tokens, picks;  // [B, size]; [depths, B]
    explicit Line(const Depths& draft)
        : draft(draft), size(draft.run.width + draft.depths + 1), tokens(draft.run.texts * size),
          picks(draft.depths * draft.run.texts * draft.count) {}
    void copy() {
        for (int64_t b = 0; b < draft.run.texts; b++)
            for (int64_t i = 1; i < size - 1; i++) tokens.numbers[b * size + i] = draft.line[b * draft.line_step + i];
    }
    // What column m of all is fed at a depth
    int64_t at(int64_t m, int64_t depth) const {
        return tokens.numbers[m / draft.run.width * size + m % draft.run.width + depth];
    }
    // The tokens chosen at a depth, put behind what was read
    void feed(int64_t depth) {
        for (int64_t b = 0; b < draft.run.texts; b++)
            tokens.numbers[b * size + draft.columns[b] + depth + 1] = picks.numbers[(depth - 1) * draft.run.texts + b];
    }
};

// [M, 2H] norm(embedding of the token that stands `depth` columns on) ; norm(x)
static const float* join(const Stage& a, const Depths& draft, const Line& line, int64_t depth, const float* x, float* own,
                         float* shared) {
    const int64_t n = a.block.hidden;
    return prepare(draft.run.tokens(), own, shared, [&](int64_t m, float* y) {
        norm(draft.embedding + line.at(m, depth) * n, a.token_norm, n, a.block.epsilon, y + m * 2 * n);
        norm(x + m * n, a.state_norm, n, a.block.epsilon, y + m * 2 * n + n);
    });
}

// The normed state of column i of [B, C], which are read out
static inline void pick(const Stage& a, const Depths& draft, const float* x, int64_t i, float* y) {
    const int64_t n = a.block.hidden, column = i / draft.count * draft.run.width + draft.columns[i];
    norm(x + column * n, a.norm, n, a.block.epsilon, y + i * n);
}

// Lower layers of the trunk as a drafter: token by token, each through `below` layers and, if one follows, through those
// above that are kept, then the exit's norm and the output matrix.
struct Exit {
    int64_t nodes;                      // tokens that are run; the last one drafts nothing
    const Layer* const* layers;  // [all]
    int64_t below, all;
    Run run;  // of one node: x [B, H], cosines, sines, places and mask are those of the first, the others' follow
    int64_t grows;  // slots to look at that every node adds: 1, or 0 where a mask says which
    const float* embedding;
    const float* norm;  // of the exit
    float epsilon;
    Output output;
    float *read, *logits;  // [B, H], [B, R]
    int64_t* tokens;       // [nodes, B] the first row is given, the others are drafted
};

// What a run of one node becomes at another
static Run moved(const Exit& exit, int64_t node) {
    Run run = exit.run;
    const int64_t size = exit.layers[0]->size, rows = run.mask_step ? run.texts : 1;
    run.cosines += node * run.angles * size;
    run.sines += node * run.angles * size;
    if (run.places) run.places += node * run.texts;
    if (run.mask) run.mask += node * rows * run.slots;
    run.first += node;
    run.slots += node * exit.grows;
    return run;
}

extern "C" {

// Every depth of a head. The scratch of `run` has M * 3H numbers more than a layer needs.
void draft_depths(const Depths* what) {
    const Depths& draft = *what;
    const Run& run = draft.run;
    const int64_t hidden = draft.stages[0]->block.hidden, rows = run.texts * draft.count;
    const bool fed = draft.stages[0]->token_norm;  // whether depths read tokens, so that one has to wait for the other
    float *joined = run.scratch, *entered = joined + run.tokens() * 2 * hidden, *rest = entered + run.tokens() * hidden;
    const Work work(draft.stages[0]->block, run.tokens(), rest);
    const Bests bests(fed ? rows : draft.depths * rows);
#pragma omp parallel
    {
        const Own own(run, 2 * hidden);
        Line line(draft);
        if (fed) line.copy();
        const float* x = run.x;
        for (int64_t d = 0; d < draft.depths; d++) {
            const Stage& stage = *draft.stages[d];
            if (fed) {
                const float* pairs = join(stage, draft, line, d + 1, x, own.prepared, joined);
                multiply(stage.project, run.tokens(), pairs, nullptr, entered);
                meet();
            }
            run_layer(stage.block, run, work, own, fed ? entered : x, run.stored + 2 * d, run.y);
            if (draft.chained) x = run.y;
            float *read = draft.read + d * rows * hidden, *logits = draft.logits + d * rows * draft.output.rows.outputs;
            if (!fed) {
                const Share mine(rows);
                for (int64_t i = mine.first; i < mine.last; i++) pick(stage, draft, run.y, i, read);
                continue;
            }
            const float* states = prepare(rows, own.prepared, read, [&](int64_t i, float* y) { pick(stage, draft, run.y, i, y); });
            read_out(draft.output, bests, states, logits, draft.picks ? line.picks.numbers + d * rows : nullptr);
            if (draft.picks) line.feed(d + 1);
        }
        if (!fed) {  // the output matrix is read once for all
            meet();
            read_out(draft.output, bests, draft.read, draft.logits, draft.picks ? line.picks.numbers : nullptr);
        }
        if (draft.picks && omp_get_thread_num() == 0)
            for (int64_t i = 0; i < draft.depths * rows; i++) draft.picks[i] = line.picks.numbers[i];
    }
}

// The lower layers as a drafter. The scratch of `run` has B * H numbers more than a layer needs.
void draft_exit(const Exit* what) {
    const Exit& exit = *what;
    const int64_t hidden = exit.layers[0]->hidden, texts = exit.run.texts;
    const Work work(*exit.layers[0], texts, exit.run.scratch + texts * hidden);
    float* above = exit.run.scratch;
    const Run last = moved(exit, exit.nodes - 1);
    const Bests bests(texts);
#pragma omp parallel
    {
        const Own own(last, hidden);
        const Memory<int64_t> tokens(texts);
        const Share mine(texts);
        for (int64_t b = 0; b < texts; b++) tokens.numbers[b] = exit.tokens[b];
        for (int64_t node = 0; node < exit.nodes; node++) {
            const Run run = moved(exit, node);
            float* state = exit.run.y + node * texts * hidden;
            for (int64_t b = mine.first; b < mine.last; b++)
                for (int64_t i = 0; i < hidden; i++) state[b * hidden + i] = exit.embedding[tokens.numbers[b] * hidden + i];
            meet();
            const float* x = state;
            for (int64_t l = 0; l < (node + 1 < exit.nodes ? exit.all : exit.below); l++) {
                float* y = l < exit.below ? state : above;
                run_layer(*exit.layers[l], run, work, own, x, exit.run.stored + 2 * l, y);
                x = y;
            }
            if (node + 1 == exit.nodes) break;
            x = norms(x, exit.norm, texts, hidden, exit.epsilon, own.prepared, exit.read);
            read_out(exit.output, bests, x, exit.logits, tokens.numbers);
            for (int64_t b = mine.first; b < mine.last; b++) exit.tokens[(node + 1) * texts + b] = tokens.numbers[b];
        }
    }
}
}
