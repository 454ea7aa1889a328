import { configure } from '@testing-library/react'

// `findBy…` and `waitFor` end with the awaited change. The limit only ends a test that waits for nothing: on a busy
// machine, the first import of a dialog takes longer than the usual second.
configure({ asyncUtilTimeout: 30_000 })
