/* The first block of a Conv4 on images of few channels: 3x3 convolution, batch norm, 2x2 max-pool and
 * ReLU, without writing the map between them, the largest of the network.
 *
 * At each position a convolution computes W p, with p the patch of d = 9 c numbers there. With m and S
 * the mean and covariance of all patches, the map of a filter has mean W m and variance W S W', so both
 * are known before the map. With A the sum of dz p over the maxima of the pools, S0 that of dz,
 * i = 1 / sqrt(variance + eps) and s = weight * i:
 *
 *     S1 = W A - mean S0,    dW = s (A - S0 m - i^2 S1 W S),    dweight = i S1,    dbias = S0,
 *
 * which follows from summing dx p with dx = s dz - s S0 / M - s i^2 S1 (x - mean) / M. So the gradient
 * depends on dy only through A and S0, and its own gradient needs no map either: see `stem.py`.
 *
 * The covariance is summed in double, because W S W' may be much smaller than the terms of S. Images
 * are [n, h + 2, w + 2, c] with a border of zeros. Element t of a patch is in row t / 3c, at place
 * t % 3c of three neighbouring pixels. As in fused.c, sums of single images, or of GROUP images, are
 * merged in order.
 */

#define POOLS (LANES == 16 ? 2 : 1) /* neighbouring pools whose sums fit into the registers */
#define AHEAD 8 /* pools to prefetch: the processor does not predict strides of f floats */
#define GROUP 8 /* images whose gradients are summed together */
#define PATCH 27 /* the largest patch */
#define WIDEST 256 /* filters, and */
#define LONGEST 512 /* pixels in a row; the caller checks both */

/* One image x [h, w, c] with its border. */
static inline void rim(const float *restrict x, size h, size w, size c, float *restrict image) {
    size line = (w + 2) * c;
    memset(image, 0, (line + c) * sizeof *image);
    for (size r = 0; r < h; r++) {
        float *row = image + (r + 1) * line + c;
        memcpy(row, x + r * w * c, w * c * sizeof *row);
        memset(row + w * c, 0, 2 * c * sizeof *row); /* right border, left border of the next row */
    }
    memset(image + (h + 1) * line + c, 0, (line - c) * sizeof *image);
}

/* Images `from` to `to` of x [n, h, w, c]. */
void fedshot_rim(const float *restrict x, size from, size to, size h, size w, size c,
                 float *restrict rimmed) {
    for (size i = from; i < to; i++)
        rim(x + i * h * w * c, h, w, c, rimmed + i * (h + 2) * (w + 2) * c);
}

/* With r and q the 3c numbers around a position of row `a` and of one of `many` other rows, add the
 * sums of r q' over all w positions to out[many][3c][3c], and those of r to sums[3c] unless it is null.
 * For c = 3 the ninth number is handled separately, because it would take a vector of its own. */
ALONE void products(const double *restrict a, const double *const *others, const size many, size w,
                    const size c, double *restrict out, double *restrict sums) {
    const size d = 3 * c, whole = c == 3 ? d - 1 : d, v = (whole + DOUBLES - 1) / DOUBLES;
    doubles none = {0}, sum[3][9][9 / DOUBLES + 1], last[3][9 / DOUBLES + 1];
    doubles one[9 / DOUBLES + 1];
    double corner[3] = {0}, ninth = 0.0;
#pragma GCC unroll 5
    for (size k = 0; k < v; k++) one[k] = none;
#pragma GCC unroll 3
    for (size i = 0; i < many; i++)
#pragma GCC unroll 5
        for (size k = 0; k < v; k++) {
            last[i][k] = none;
#pragma GCC unroll 9
            for (size j = 0; j < d; j++) sum[i][j][k] = none;
        }
    for (size q = 0; q < w; q++) {
        const double *r = a + q * c;
        if (sums) {
#pragma GCC unroll 5
            for (size k = 0; k < v; k++) one[k] += ((const doubles *)r)[k];
            if (whole < d) ninth += r[d - 1];
        }
#pragma GCC unroll 3
        for (size i = 0; i < many; i++) {
            const double *b = others[i] + q * c;
#pragma GCC unroll 5
            for (size k = 0; k < v; k++) {
                doubles y = ((const doubles *)b)[k];
#pragma GCC unroll 9
                for (size j = 0; j < d; j++) sum[i][j][k] += y * r[j];
                if (whole < d) last[i][k] += ((const doubles *)r)[k] * b[d - 1];
            }
            if (whole < d) corner[i] += r[d - 1] * b[d - 1];
        }
    }
    for (size i = 0; i < many; i++, out += d * d) {
        for (size j = 0; j < d; j++)
            for (size k = 0; k < whole; k++) out[j * d + k] += sum[i][j][k / DOUBLES][k % DOUBLES];
        if (whole == d) continue;
        for (size j = 0; j < whole; j++) out[j * d + whole] += last[i][j / DOUBLES][j % DOUBLES];
        out[whole * d + whole] += corner[i];
    }
    for (size k = 0; sums && k < d; k++)
        sums[k] += k < whole ? one[k / DOUBLES][k % DOUBLES] : ninth;
}

/* For one image with its border, with r the 3c numbers around a position, summed over all positions:
 * r r', r times r' of the next row, and of the row after that; r r' over the first row and over the
 * last; then r over all rows, the first and the last. */
ALONE void correlate(const float *restrict image, size h, size w, const size c,
                     double *restrict out) {
    const size d = 3 * c, square = d * d;
    double ring[3][3 * (LONGEST + 2) + DOUBLES], row[PATCH * PATCH / 3 + PATCH];
    double *sums = out + 5 * square;
    size line = (w + 2) * c;
    for (size k = 0; k < 5 * square + 3 * d; k++) out[k] = 0.0;
    for (size i = 0; i < 3; i++)
        for (size k = 0; k < DOUBLES; k++) ring[i][line + k] = 0.0; /* read, but not used */
    for (size i = 1; i < 3; i++)
        for (size k = 0; k < line; k++) ring[i][k] = (double)image[i * line + k];
    for (size r = 0; r < h; r++) {
        const double *rows[3] = {ring[(r + 1) % 3], ring[(r + 2) % 3], ring[r % 3]};
        double *after = ring[r % 3];
        for (size k = 0; k < line; k++)
            after[k] = r + 3 < h + 2 ? (double)image[(r + 3) * line + k] : 0.0;
        for (size k = 0; k < 3 * square + d; k++) row[k] = 0.0;
        if (c == 1)
            products(rows[0], rows, 3, w, c, row, row + 3 * square);
        else
            for (size i = 0; i < 3; i++)
                products(rows[0], rows + i, 1, w, c, row + i * square,
                         i == 0 ? row + 3 * square : NULL);
        for (size k = 0; k < 3 * square; k++) out[k] += row[k];
        for (size k = 0; k < d; k++) sums[k] += row[3 * square + k];
        if (r > 0 && r < h - 1) continue;
        size end = r == 0 ? 0 : 1;
        memcpy(out + (3 + end) * square, row, square * sizeof *row);
        memcpy(sums + (1 + end) * d, row + 3 * square, d * sizeof *row);
    }
}

/* Images with their borders, and sums[image][45 c c + 9 c] as in `correlate`. */
void fedshot_patches(const float *restrict x, size from, size to, size h, size w, size c,
                     float *restrict rimmed, double *restrict sums) {
    for (size i = from; i < to; i++) {
        float *image = rimmed + i * (h + 2) * (w + 2) * c;
        double *out = sums + i * (45 * c * c + 9 * c);
        rim(x + i * h * w * c, h, w, c, image);
        if (c == 1)
            correlate(image, h, w, 1, out);
        else
            correlate(image, h, w, 3, out);
    }
}

/* The batch norm of n images, from the `parts` of `fedshot_patches`, which are summed into those of
 * the first image. Of the patches: covariance[9c][9c], mean[9c] and W S [9c][f]. Of the map: mu[f]
 * twice, inverse[f], var[f]. The factors and summands of `fedshot_stem`: folded[9c][f] and shift[f]. */
void fedshot_stem_norm(double *restrict parts, const float *restrict filters,
                       const float *restrict weight, const float *restrict bias, size n, size h,
                       size w, size c, size f, float eps, double *restrict covariance,
                       double *restrict mean, double *restrict spread, double *restrict mu,
                       double *restrict inverse, float *restrict mu_float, float *restrict var,
                       float *restrict folded, float *restrict shift) {
    size d = 3 * c, all = 3 * d, each = 5 * d * d + 3 * d;
    double m = (double)n * (double)h * (double)w, square[WIDEST];
    double turned[PATCH * WIDEST];
    for (size i = 1; i < n; i++)
        for (size k = 0; k < each; k++) parts[k] += parts[i * each + k];
    const double *same = parts, *next = same + d * d, *after = next + d * d;
    const double *first = after + d * d, *last = first + d * d, *sums = last + d * d;
    for (size k = 0; k < d; k++) {
        mean[k] = (sums[k] - sums[2 * d + k]) / m; /* the row above a position is never the last */
        mean[d + k] = sums[k] / m;
        mean[2 * d + k] = (sums[k] - sums[d + k]) / m;
    }
    for (size j = 0; j < d; j++)
        for (size k = 0; k < d; k++) {
            size at = j * d + k, back = k * d + j;
            covariance[j * all + k] = same[at] - last[at];
            covariance[(d + j) * all + d + k] = same[at];
            covariance[(2 * d + j) * all + 2 * d + k] = same[at] - first[at];
            covariance[j * all + d + k] = covariance[(d + j) * all + 2 * d + k] = next[at];
            covariance[(d + j) * all + k] = covariance[(2 * d + j) * all + d + k] = next[back];
            covariance[j * all + 2 * d + k] = after[at];
            covariance[(2 * d + j) * all + k] = after[back];
        }
    for (size t = 0; t < all; t++)
        for (size u = 0; u < all; u++)
            covariance[t * all + u] = covariance[t * all + u] / m - mean[t] * mean[u];
    for (size t = 0; t < all; t++)
        for (size k = 0; k < f; k++)
            turned[t * f + k] = (double)filters[(k * c + t % c) * 9 + t / c];
    for (size k = 0; k < f; k++) mu[k] = square[k] = 0.0;
    for (size t = 0; t < all; t++) {
        double *row = spread + t * f;
        for (size k = 0; k < f; k++) row[k] = 0.0;
        for (size u = 0; u < all; u++)
            for (size k = 0; k < f; k++) row[k] += covariance[t * all + u] * turned[u * f + k];
        for (size k = 0; k < f; k++) square[k] += row[k] * turned[t * f + k];
        for (size k = 0; k < f; k++) mu[k] += mean[t] * turned[t * f + k];
    }
    for (size k = 0; k < f; k++) {
        double v = square[k] < 0.0 ? 0.0 : square[k]; /* negative by rounding */
        inverse[k] = 1.0 / sqrt(v + (double)eps);
        var[k] = (float)v;
        mu_float[k] = (float)mu[k];
        square[k] = (double)weight[k] * inverse[k];
        shift[k] = (float)((double)bias[k] - mu[k] * square[k]);
    }
    for (size t = 0; t < all; t++)
        for (size k = 0; k < f; k++) folded[t * f + k] = (float)(turned[t * f + k] * square[k]);
}

ALONE lanes either(words where, lanes a, lanes b) {
    return (lanes)((where & (words)a) | (~where & (words)b));
}

/* `many` neighbouring pools of 2 LANES filters: y, and in `won` the index of the maximum, or 4 if the
 * ReLU gives 0. If `known`, `won` is given and y is the value at that index, or 0 for 4. */
ALONE void stem_pools(const float *restrict at, size line, const size c, const size many,
                      const float *restrict folded, const float *restrict shift, size f,
                      const int known, float *restrict y, uint8_t *restrict won) {
    lanes a[4 * POOLS][2];
#pragma GCC unroll 8
    for (size i = 0; i < 4 * many; i++) {
        a[i][0] = *(const lanes *)shift;
        a[i][1] = *(const lanes *)(shift + LANES);
    }
    for (size r = 0; r < 3; r++)
#pragma GCC unroll 9
        for (size j = 0; j < 3 * c; j++) {
            const float *rule = folded + (r * 3 * c + j) * f, *x = at + r * line + j;
            lanes u = *(const lanes *)rule, v = *(const lanes *)(rule + LANES);
#pragma GCC unroll 8
            for (size i = 0; i < 4 * many; i++) {
                float pixel = x[(i / 2 % 2) * line + (i % 2 + i / 4 * 2) * c];
                a[i][0] += u * pixel;
                a[i][1] += v * pixel;
            }
        }
#pragma GCC unroll 4
    for (size i = 0; i < 2 * many; i++) {
        size pool = i / 2, half = i % 2;
        lanes a0 = a[4 * pool][half], a1 = a[4 * pool + 1][half];
        lanes a2 = a[4 * pool + 2][half], a3 = a[4 * pool + 3][half], none = {0};
        if (known) {
            words who = __builtin_convertvector(*(bytes *)(won + pool * f + half * LANES), words);
            lanes first = either(who == 0, a0, either(who == 1, a1, none));
            lanes y_known = either(who == 2, a2, either(who == 3, a3, first));
            *(lanes *)(y + pool * f + half * LANES) = y_known;
            continue;
        }
        words upper = a1 > a0, lower = a3 > a2;
        lanes p = either(upper, a1, a0), q = either(lower, a3, a2);
        words below = q > p, who = (below & (2 - lower)) | (~below & -upper);
        p = either(below, q, p);
        words dead = p <= none, whole = (a0 == a0) & (a1 == a1) & (a2 == a2) & (a3 == a3);
        *(lanes *)(y + pool * f + half * LANES) = either(whole, either(dead, none, p), none + NAN);
        who = (~dead & who) | (dead & 4);
        if (won) *(bytes *)(won + pool * f + half * LANES) = __builtin_convertvector(who, bytes);
    }
}

ALONE void stem_image(const float *restrict image, size h, size w, const size c, size f,
                      const float *restrict folded, const float *restrict shift, const int known,
                      float *restrict y, uint8_t *restrict won) {
    size ph = h / 2, pw = w / 2, line = (w + 2) * c;
    for (size k = 0; k < f; k += 2 * LANES)
        for (size r = 0; r < ph; r++) {
            const float *row = image + 2 * r * line;
            size q = 0, at = r * pw * f + k;
            for (; q + POOLS <= pw; q += POOLS, at += POOLS * f)
                stem_pools(row + 2 * q * c, line, c, POOLS, folded + k, shift + k, f, known,
                           y + at, won ? won + at : won);
            if (POOLS > 1 && q < pw)
                stem_pools(row + 2 * q * c, line, c, 1, folded + k, shift + k, f, known, y + at,
                           won ? won + at : won);
        }
}

/* y = relu(maxpool(conv(x) * scale + shift)) [n, h / 2, w / 2, f], with the scale in `folded`; a pool
 * with a NaN gives NaN. won[n, h / 2, w / 2, f]: index of the maximum, 4 for none; may be null. */
void fedshot_stem(const float *restrict rimmed, const float *restrict folded,
                  const float *restrict shift, size from, size to, size h, size w, size c, size f,
                  float *restrict y, uint8_t *restrict won) {
    size pools = (h / 2) * (w / 2) * f;
    for (size i = from; i < to; i++) {
        const float *image = rimmed + i * (h + 2) * (w + 2) * c;
        uint8_t *which = won ? won + i * pools : won;
        if (c == 1)
            stem_image(image, h, w, 1, f, folded, shift, 0, y + i * pools, which);
        else
            stem_image(image, h, w, 3, f, folded, shift, 0, y + i * pools, which);
    }
}

/* y = conv(x) + shift at the indices `won`, and 0 where they are 4. */
void fedshot_stem_known(const float *restrict rimmed, const float *restrict filters,
                        const float *restrict shift, uint8_t *restrict won, size from, size to,
                        size h, size w, size c, size f, float *restrict y) {
    size pools = (h / 2) * (w / 2) * f;
    for (size i = from; i < to; i++) {
        const float *image = rimmed + i * (h + 2) * (w + 2) * c;
        if (c == 1)
            stem_image(image, h, w, 1, f, filters, shift, 1, y + i * pools, won + i * pools);
        else
            stem_image(image, h, w, 3, f, filters, shift, 1, y + i * pools, won + i * pools);
    }
}

/* Add the sums of dz p and of dz over one image to out[9c + 1][f]. */
ALONE void stem_sums(const float *restrict image, const uint8_t *restrict won,
                     const float *restrict dy, size h, size w, const size c, size f,
                     double *restrict out) {
    const size d = 3 * c;
    size ph = h / 2, pw = w / 2, line = (w + 2) * c, rows = 128 / pw > 0 ? 128 / pw : 1;
    for (size k = 0; k < f; k += LANES)
        for (size first = 0; first < ph; first += rows) {
            size last = first + rows < ph ? first + rows : ph;
            lanes total = {0}, sum[PATCH];
#pragma GCC unroll 27
            for (size t = 0; t < 3 * d; t++) sum[t] = total;
            for (size r = first; r < last; r++)
                for (size q = 0; q < pw; q++) {
                    size at = (r * pw + q) * f + k;
                    words who = __builtin_convertvector(*(const bytes *)(won + at), words);
                    words g = *(const words *)(dy + at);
                    __builtin_prefetch(dy + at + AHEAD * f);
                    __builtin_prefetch(won + at + AHEAD * f);
                    for (size i = 0; i < 4; i++) {
                        lanes dz = (lanes)(g & (who == (int32_t)i));
                        const float *x = image + (2 * r + i / 2) * line + (2 * q + i % 2) * c;
                        total += dz;
#pragma GCC unroll 27
                        for (size t = 0; t < 3 * d; t++) sum[t] += dz * x[t / d * line + t % d];
                    }
                }
            for (size t = 0; t < 3 * d; t++)
                for (size j = 0; j < LANES; j++) out[t * f + k + j] += (double)sum[t][j];
            for (size j = 0; j < LANES; j++) out[3 * d * f + k + j] += (double)total[j];
        }
}

/* out[group][9c + 1][f]: sums of dz p over the maxima, and of dz, for the groups `from` to `to`. */
void fedshot_stem_sums(const float *restrict rimmed, const uint8_t *restrict won,
                       const float *restrict dy, size from, size to, size n, size h, size w, size c,
                       size f, double *restrict out) {
    size pools = (h / 2) * (w / 2) * f, each = (9 * c + 1) * f;
    for (size i = from * GROUP; i < to * GROUP && i < n; i++) {
        const float *image = rimmed + i * (h + 2) * (w + 2) * c;
        double *at = out + i / GROUP * each;
        if (i % GROUP == 0)
            for (size k = 0; k < each; k++) at[k] = 0.0;
        if (c == 1)
            stem_sums(image, won + i * pools, dy + i * pools, h, w, 1, f, at);
        else
            stem_sums(image, won + i * pools, dy + i * pools, h, w, 3, f, at);
    }
}

/* The gradients of filters [f, c, 3, 3], weight [f] and bias [f], from the sums of
 * `fedshot_stem_sums`, which are added up in those of the first group. */
void fedshot_stem_grad(double *restrict parts, const float *restrict filters,
                       const float *restrict weight, const double *restrict mean,
                       const double *restrict spread, const double *restrict mu,
                       const double *restrict inverse, size groups, size c, size f,
                       float *restrict d_filters, float *restrict d_weight,
                       float *restrict d_bias) {
    size all = 9 * c, each = (all + 1) * f;
    double s1[WIDEST];
    for (size i = 1; i < groups; i++)
        for (size k = 0; k < each; k++) parts[k] += parts[i * each + k];
    const double *s0 = parts + all * f;
    for (size k = 0; k < f; k++) s1[k] = -mu[k] * s0[k];
    for (size t = 0; t < all; t++)
        for (size k = 0; k < f; k++)
            s1[k] += (double)filters[(k * c + t % c) * 9 + t / c] * parts[t * f + k];
    for (size k = 0; k < f; k++) {
        d_weight[k] = (float)(inverse[k] * s1[k]);
        d_bias[k] = (float)s0[k];
    }
    for (size t = 0; t < all; t++)
        for (size k = 0; k < f; k++) {
            double i = inverse[k], rest = s0[k] * mean[t] + i * i * s1[k] * spread[t * f + k];
            d_filters[(k * c + t % c) * 9 + t / c] =
                (float)((double)weight[k] * i * (parts[t * f + k] - rest));
        }
}
