/** Exchanges a token for a session. The browser does not keep the token. */
import '@mantine/core/styles/PasswordInput.css'
import { Button, PasswordInput } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useMutation, useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'
import { useNavigate, useSearchParams } from 'react-router'

import { session } from '../api/client'
import { Form, Problem } from '../parts/Basics'
import { SIGN_IN } from '../words/settings'

export default function SignInPage() {
  useDocumentTitle('Sign in, Everstep')
  const [token, setToken] = useState('')
  const [search] = useSearchParams()
  const client = useQueryClient()
  const navigate = useNavigate()
  const request = useMutation({
    mutationFn: () => session.signIn(token.trim()),
    onSuccess: (signedIn) => {
      client.clear()
      client.setQueryData(['session'], signedIn)
      void navigate(safePath(search.get('next')), { replace: true })
    },
  })
  return (
    <main className="signin stack">
      <div className="row">
        <img src="/favicon.svg" width="30" height="30" alt="" />
        <h1>Everstep</h1>
      </div>
      <Form className="card stack" onSubmit={() => request.mutate()}>
        <PasswordInput
          label={SIGN_IN.token.label}
          description={SIGN_IN.token.text}
          required
          data-autofocus
          autoFocus
          autoComplete="current-password"
          value={token}
          onChange={(event) => setToken(event.currentTarget.value)}
        />
        <Button type="submit" loading={request.isPending} disabled={!token.trim()}>
          {SIGN_IN.button}
        </Button>
        <p className="dim">
          {SIGN_IN.first} <code>admin_token</code>. {SIGN_IN.local} <code>everstep local env</code>
        </p>
      </Form>
      {request.error && <Problem error={request.error} title={SIGN_IN.failed} />}
    </main>
  )
}

/** Return the path to open after the sign-in. Only a path of this application is accepted. */
function safePath(next: string | null): string {
  const isOwn = next !== null && next.startsWith('/') && !next.startsWith('//') && !next.startsWith('/sign-in')
  return isOwn ? next : '/'
}
