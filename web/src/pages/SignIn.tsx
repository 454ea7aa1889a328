/** A token becomes a session; the token itself is not kept anywhere in the browser. */
import { Button, PasswordInput } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'
import { useNavigate, useSearchParams } from 'react-router'

import { session } from '../api/client'
import { Problem } from '../parts/Basics'

export default function SignInPage() {
  useDocumentTitle('Sign in, Everstep')
  const [token, setToken] = useState('')
  const [error, setError] = useState<unknown>()
  const [isBusy, setBusy] = useState(false)
  const [search] = useSearchParams()
  const client = useQueryClient()
  const navigate = useNavigate()
  const wanted = search.get('next') ?? '/'
  const next = wanted.startsWith('/') && !wanted.startsWith('//') && !wanted.startsWith('/sign-in') ? wanted : '/'
  return (
    <main className="signin stack">
      <div className="row">
        <img src="/favicon.svg" width="30" height="30" alt="" />
        <h1>Everstep</h1>
      </div>
      <form
        className="card stack"
        onSubmit={(event) => {
          event.preventDefault()
          setBusy(true)
          setError(undefined)
          session
            .signIn(token.trim())
            .then((signedIn) => {
              client.clear()
              client.setQueryData(['session'], signedIn)
              void navigate(next, { replace: true })
            }, setError)
            .finally(() => setBusy(false))
        }}
      >
        <PasswordInput label="Token" description="It is exchanged for a session of at most 12 hours." required data-autofocus autoFocus autoComplete="current-password" value={token} onChange={(event) => setToken(event.currentTarget.value)} />
        <Button type="submit" loading={isBusy} disabled={!token.trim()}>
          Sign in
        </Button>
        <p className="dim">
          The first administrator’s token is in the server’s state directory: <code>admin_token</code>. On a local cluster, <code>everstep local env</code> prints it.
        </p>
      </form>
      {error !== undefined && <Problem error={error} title="Not signed in" />}
    </main>
  )
}
