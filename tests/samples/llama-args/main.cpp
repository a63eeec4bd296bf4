// Reads arguments and variables with the parser of llama-server, and prints what they set.
#include <cstdio>

#include "arg.h"
#include "common.h"

int main(int argc, char ** argv) {
    common_params params;
    if (!common_params_parse(argc, argv, params, LLAMA_EXAMPLE_SERVER)) {
        return 1;
    }
    printf("fit=%d margin_mib=%zu layers_set=%d context_set=%d\n", params.fit_params,
           params.fit_params_target[0] >> 20, params.n_gpu_layers >= 0, params.n_ctx > 0);
    return 0;
}
