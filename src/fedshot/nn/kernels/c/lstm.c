/* An LSTM over texts of different lengths, concatenated without padding.
 *
 * `at` [texts + 1] has the first row of each text. TEXTS texts at a time are computed, in `order`, so
 * that the texts of a block have similar lengths; `from` and `to` count blocks. With `back` = 1 a
 * text is read from its last word. `gates` holds i | f | g | o of each word, in rows with a stride of
 * `lie` floats; cells, squashed (the tanh of the cells) and states are contiguous.
 *
 * The rows of right factors are padded with zeros to a multiple of 16, and so of LANES.
 */

enum { TEXTS = 6 };

/* sums [TEXTS][wide] += rows [TEXTS][n] times m [n][wide]. */
static inline void add_product(const float *const *rows, const float *restrict m, size n, size wide,
                               float *restrict sums) {
    for (size j = 0; j < wide; j += LANES) {
        lanes s[TEXTS];
        for (size b = 0; b < TEXTS; b++) s[b] = *(const lanes *)(sums + b * wide + j);
        for (size k = 0; k < n; k++) {
            lanes line = *(const lanes *)(m + k * wide + j);
            for (size b = 0; b < TEXTS; b++) s[b] += rows[b][k] * line;
        }
        for (size b = 0; b < TEXTS; b++) *(lanes *)(sums + b * wide + j) = s[b];
    }
}

static inline size row_of(const int64_t *at, size text, size step, size back) {
    return (size)(back ? at[text + 1] - 1 - step : at[text] + step);
}

/* The texts of a block, -1 for none, and the number of words of the longest. */
static inline size block_of(const int64_t *at, const int64_t *order, size texts, size block,
                            size *own) {
    size most = 0;
    for (size b = 0; b < TEXTS; b++) {
        size place = block * TEXTS + b;
        own[b] = place < texts ? (size)order[place] : -1;
        size steps = own[b] < 0 ? 0 : (size)(at[own[b] + 1] - at[own[b]]);
        most = steps > most ? steps : most;
    }
    return most;
}

static inline int goes_on(const int64_t *at, size text, size step) {
    return text >= 0 && step < (size)(at[text + 1] - at[text]);
}

/* `turned` [hidden][wide] is the transposed weight of the state, `bias` [wide] its bias, both padded;
 * `gates` holds x w + b and is replaced by the gates. `done` becomes 0 if memory runs out. */
void fedshot_lstm(const float *restrict turned, const float *restrict bias, const int64_t *at,
                  const int64_t *order, size from, size to, size texts, size hidden, size wide,
                  size back, size lie, float *restrict gates, float *restrict cells,
                  float *restrict squashed, float *restrict states, int64_t *done) {
    float *sums = malloc((size_t)(TEXTS * wide + hidden) * sizeof *sums);
    if (!sums) {
        *done = 0;
        return;
    }
    float *zero = sums + TEXTS * wide;
    for (size k = 0; k < hidden; k++) zero[k] = 0.0f;
    for (size block = from; block < to; block++) {
        size own[TEXTS], most = block_of(at, order, texts, block, own);
        for (size step = 0; step < most; step++) {
            const float *before[TEXTS];
            for (size b = 0; b < TEXTS; b++) {
                int some = step && goes_on(at, own[b], step);
                before[b] = some ? states + row_of(at, own[b], step - 1, back) * hidden : zero;
                memcpy(sums + b * wide, bias, (size_t)wide * sizeof *sums);
            }
            if (step) add_product(before, turned, hidden, wide, sums);
            for (size b = 0; b < TEXTS; b++) {
                if (!goes_on(at, own[b], step)) continue;
                size row = row_of(at, own[b], step, back);
                const float *s = sums + b * wide;
                const float *past = step ? cells + row_of(at, own[b], step - 1, back) * hidden : zero;
                float *g = gates + row * lie, *c = cells + row * hidden;
                float *q = squashed + row * hidden, *h = states + row * hidden;
                for (size k = 0; k < hidden; k++) {
                    float in = gate_sigmoid(g[k] + s[k]);
                    float forget = gate_sigmoid(g[hidden + k] + s[hidden + k]);
                    float new = gate_tanh(g[2 * hidden + k] + s[2 * hidden + k]);
                    float out = gate_sigmoid(g[3 * hidden + k] + s[3 * hidden + k]);
                    float cell = forget * past[k] + in * new;
                    float flat = gate_tanh(cell);
                    g[k] = in;
                    g[hidden + k] = forget;
                    g[2 * hidden + k] = new;
                    g[3 * hidden + k] = out;
                    c[k] = cell;
                    q[k] = flat;
                    h[k] = out * flat;
                }
            }
        }
    }
    free(sums);
}

/* The gradient by_x of the sums before the gates, from the gradient `grad` of the states, with a
 * stride of `text` floats between texts and `word` between words. `u` [4 hidden][wide] is the padded
 * weight of the state. */
void fedshot_lstm_back(const float *restrict u, const int64_t *at, const int64_t *order,
                       const float *restrict gates, const float *restrict cells,
                       const float *restrict squashed, const float *restrict grad, size from,
                       size to, size texts, size hidden, size wide, size back, size lie, size text,
                       size word, float *restrict by_x, int64_t *done) {
    float *carry = malloc((size_t)(TEXTS * (wide + hidden) + 5 * hidden) * sizeof *carry);
    if (!carry) {
        *done = 0;
        return;
    }
    float *of_cell = carry + TEXTS * wide, *zero = of_cell + TEXTS * hidden; /* 4 hidden, and one */
    for (size k = 0; k < 5 * hidden; k++) zero[k] = 0.0f;
    for (size block = from; block < to; block++) {
        size own[TEXTS], most = block_of(at, order, texts, block, own);
        for (size k = 0; k < TEXTS * (wide + hidden); k++) carry[k] = 0.0f;
        for (size step = most - 1; step >= 0; step--) {
            const float *after[TEXTS];
            for (size b = 0; b < TEXTS; b++) {
                after[b] = zero;
                if (!goes_on(at, own[b], step)) continue;
                size row = row_of(at, own[b], step, back);
                const float *past = step ? cells + row_of(at, own[b], step - 1, back) * hidden : zero;
                const float *g = gates + row * lie, *q = squashed + row * hidden;
                const float *d = grad + own[b] * text + (row - (size)at[own[b]]) * word;
                float *dx = by_x + row * lie, *dh = carry + b * wide, *dc = of_cell + b * hidden;
                for (size k = 0; k < hidden; k++) {
                    float in = g[k], forget = g[hidden + k], new = g[2 * hidden + k];
                    float out = g[3 * hidden + k], by_h = dh[k] + d[k];
                    float by_c = dc[k] + by_h * out * (1.0f - q[k] * q[k]);
                    dx[k] = by_c * new * in * (1.0f - in);
                    dx[hidden + k] = by_c * past[k] * forget * (1.0f - forget);
                    dx[2 * hidden + k] = by_c * in * (1.0f - new * new);
                    dx[3 * hidden + k] = by_h * q[k] * out * (1.0f - out);
                    dc[k] = by_c * forget;
                }
                after[b] = dx;
            }
            if (step) {
                for (size k = 0; k < TEXTS * wide; k++) carry[k] = 0.0f;
                add_product(after, u, 4 * hidden, wide, carry);
            }
        }
    }
    free(carry);
}
