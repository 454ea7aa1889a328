import { configure } from '@testing-library/react'

// `findBy…` and `waitFor` wait until the awaited change, so only a failing test waits up to this limit. The library's
// limit of one second is too short: on a busy machine, the first import of a dialog takes longer.
configure({ asyncUtilTimeout: 30_000 })
