/* The loss of prototypical networks with its gradient, Snell et al. 2017, eqs. (1) and (2). A
 * prototype is the mean of the support of a class, a logit is minus the squared distance to a
 * prototype, and the loss is the mean cross-entropy.
 */

ALONE float squares_between(const float *restrict a, const float *restrict b, size width) {
    lanes sum = {0};
    size k = 0;
    for (; k + LANES <= width; k += LANES) {
        lanes apart = *(const lanes *)(a + k) - *(const lanes *)(b + k);
        sum += apart * apart;
    }
    float total = 0;
    for (size i = 0; i < LANES; i++) total += sum[i];
    for (; k < width; k++) total += (a[k] - b[k]) * (a[k] - b[k]);
    return total;
}

static void prototype_means(const float *restrict h, const int64_t *restrict y, size n, size width,
                            size way, float *restrict means, float *restrict counts) {
    memset(means, 0, sizeof(float) * (size_t)(way * width));
    memset(counts, 0, sizeof(float) * (size_t)way);
    for (size i = 0; i < n; i++) {
        if (y[i] < 0 || y[i] >= way) continue;
        float *mean = means + y[i] * width;
        counts[y[i]] += 1;
        for (size k = 0; k < width; k++) mean[k] += h[i * width + k];
    }
    for (size c = 0; c < way; c++) {
        if (counts[c] == 0) counts[c] = 1;
        for (size k = 0; k < width; k++) means[c * width + k] /= counts[c];
    }
}

/* The cross-entropy of a row of class y; `logits` are replaced by their gradients. */
static double cross_entropy(float *restrict logits, size way, int64_t y, size *restrict hit) {
    size best = 0;
    for (size c = 1; c < way; c++) best = logits[c] > logits[best] ? c : best;
    float most = logits[best], sum = 0;
    *hit = best == y;
    float own = logits[y] - most;
    for (size c = 0; c < way; c++) sum += logits[c] = expf(logits[c] - most);
    for (size c = 0; c < way; c++) logits[c] /= sum;
    logits[y] -= 1;
    return (double)logf(sum) - own;
}

/* The loss of a row of class y. `dx` becomes the gradient of the row, for a mean over `rows` rows, and
 * those of the means are added to `by_mean`. `logits` is memory for `way` numbers. */
ALONE double row_loss(const float *restrict x, int64_t y, const float *restrict means, size way,
                      size width, float rows, float *restrict logits, float *restrict by_mean,
                      float *restrict dx, size *restrict hit) {
    for (size c = 0; c < way; c++) logits[c] = -squares_between(x, means + c * width, width);
    double loss = cross_entropy(logits, way, y, hit);
    memset(dx, 0, sizeof(float) * (size_t)width);
    for (size c = 0; c < way; c++) {
        float by = -2 * logits[c] / rows;
        const float *mean = means + c * width;
        float *restrict to_mean = by_mean + c * width;
        for (size k = 0; k < width; k++) {
            float part = by * (x[k] - mean[k]);
            dx[k] += part;
            to_mean[k] -= part;
        }
    }
    return loss;
}

/* The losses of the episodes `from` to `to`. `h` holds n support rows and then q query rows of
 * `width` floats per episode, y their labels, 0 to way - 1. A support row with another label belongs
 * to no class; a query with one sets `wrong`. `loss` and `accuracy` get one number per episode, `dh`
 * the gradients of the rows; `room` has way * (2 width + 2) floats per episode. */
void fedshot_prototypes(const float *restrict h, const int64_t *restrict y, size from, size to,
                        size n, size q, size width, size way, float *restrict room,
                        float *restrict loss, float *restrict accuracy, float *restrict dh,
                        int64_t *wrong) {
    for (size e = from; e < to; e++) {
        const float *rows = h + e * (n + q) * width, *queries = rows + n * width;
        const int64_t *labels = y + e * (n + q);
        float *means = room + e * way * (2 * width + 2), *by_mean = means + way * width;
        float *counts = by_mean + way * width, *logits = counts + way;
        float *out = dh + e * (n + q) * width;
        double total = 0;
        size right = 0, hit;
        prototype_means(rows, labels, n, width, way, means, counts);
        memset(by_mean, 0, sizeof(float) * (size_t)(way * width));
        for (size i = 0; i < q; i++) {
            if (labels[n + i] < 0 || labels[n + i] >= way) {
                *wrong = 1;
                break;
            }
            total += row_loss(queries + i * width, labels[n + i], means, way, width, (float)q, logits,
                              by_mean, out + (n + i) * width, &hit);
            right += hit;
        }
        for (size i = 0; i < n; i++) {
            float *ds = out + i * width;
            int64_t c = labels[i];
            int held = c >= 0 && c < way;
            for (size k = 0; k < width; k++) ds[k] = held ? by_mean[c * width + k] / counts[c] : 0;
        }
        loss[e] = (float)(total / (double)q);
        accuracy[e] = (float)right / (float)q;
    }
}
