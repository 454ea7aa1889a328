/** Tokens of people and programs: made, with the secret shown once, and revoked. */
import { Button, NativeSelect, Switch, TextInput } from '@mantine/core'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'

import { call } from '../api/client'
import { tokensQuery } from '../api/queries'
import type { CreateTokenRequest, Token } from '../contract'
import { utc } from '../model/format'
import { Ago, Command, Problem, Shown, Status, useNow } from './Basics'
import { ConfirmByName } from './ConfirmByName'

const DAY = 86_400
const LASTS = [['30', '30 days'], ['7', '7 days'], ['1', '1 day'], ['365', 'a year'], ['', 'until it is revoked']] as const

export function Tokens({ own }: { own: string }) {
  const [withEnded, setWithEnded] = useState(false)
  const query = useQuery(tokensQuery(withEnded))
  return (
    <section className="card stack">
      <div className="row between">
        <h2>Tokens</h2>
        <Switch size="xs" label="Ended ones, too" checked={withEnded} onChange={(event) => setWithEnded(event.currentTarget.checked)} />
      </div>
      <Make />
      <Shown query={query}>{(tokens) => <Table tokens={tokens} own={own} />}</Shown>
    </section>
  )
}

function Make() {
  const client = useQueryClient()
  const [role, setRole] = useState<CreateTokenRequest['Role']>('viewer')
  const [project, setProject] = useState('')
  const [description, setDescription] = useState('')
  const [days, setDays] = useState('30')
  const [secret, setSecret] = useState('')
  const [error, setError] = useState<unknown>()
  const [isBusy, setBusy] = useState(false)
  if (secret) {
    return (
      <section className="banner tone-warn" role="status" aria-label="The new token">
        <div className="stack" style={{ minWidth: 0 }}>
          <strong>This is shown once. Give it to whom it is for; the service keeps its digest alone.</strong>
          <Command text={secret} />
          <div>
            <Button size="xs" variant="default" onClick={() => setSecret('')}>
              I have it
            </Button>
          </div>
        </div>
      </section>
    )
  }
  return (
    <form
      className="row"
      style={{ alignItems: 'end' }}
      onSubmit={(event) => {
        event.preventDefault()
        setBusy(true)
        setError(undefined)
        call('CreateToken', { Role: role, ...(project && role !== 'admin' ? { Project: project } : {}), ...(description ? { Description: description } : {}), ...(days ? { ExpiresInSeconds: Number(days) * DAY } : {}) })
          .then((made) => {
            setSecret(made.Secret)
            setDescription('')
            return client.invalidateQueries({ queryKey: ['tokens'] })
          }, setError)
          .finally(() => setBusy(false))
      }}
    >
      <NativeSelect size="xs" label="Role" value={role} data={[{ value: 'viewer', label: 'viewer: reads' }, { value: 'submitter', label: 'submitter: runs jobs' }, { value: 'admin', label: 'admin: everything' }]} onChange={(event) => setRole(event.currentTarget.value as typeof role)} />
      <TextInput size="xs" label="Project" placeholder="every project" value={role === 'admin' ? '' : project} disabled={role === 'admin'} onChange={(event) => setProject(event.currentTarget.value.trim())} autoComplete="off" spellCheck={false} />
      <TextInput size="xs" label="Whose, or what for" value={description} onChange={(event) => setDescription(event.currentTarget.value)} autoComplete="off" />
      <NativeSelect size="xs" label="Lasts" value={days} data={LASTS.map(([value, label]) => ({ value, label }))} onChange={(event) => setDays(event.currentTarget.value)} />
      <Button size="xs" type="submit" loading={isBusy}>
        Make a token
      </Button>
      {error !== undefined && <Problem error={error} title="It was not made" />}
    </form>
  )
}

function Table({ tokens, own }: { tokens: Token[]; own: string }) {
  const client = useQueryClient()
  const now = useNow()
  const [asked, setAsked] = useState<Token>()
  return (
    <div className="scroll">
      <table className="grid stacked">
        <thead>
          <tr>
            <th>Token</th>
            <th>Role</th>
            <th>For</th>
            <th>Whose</th>
            <th>Made</th>
            <th>Lasts until</th>
            <th><span className="visually-hidden">End it</span></th>
          </tr>
        </thead>
        <tbody>
          {tokens.map((token) => {
            const isOver = token.RevocationTime !== undefined || (token.ExpirationTime !== undefined && token.ExpirationTime <= now)
            return (
              <tr key={token.TokenId}>
                <td className="mono" data-name="Token">{token.TokenId}</td>
                <td data-name="Role">{token.Kind === 'join' ? 'joins nodes' : token.Role}</td>
                <td data-name="For">{token.FleetName ? `fleet ${token.FleetName}` : (token.Project ?? 'every project')}</td>
                <td data-name="Whose">{token.Description || '–'}{token.TokenId === own && ' (this session’s)'}</td>
                <td data-name="Made"><Ago at={token.CreationTime} /></td>
                <td data-name="Lasts until">{token.RevocationTime !== undefined ? <Status tone="idle" word="revoked" title={utc(token.RevocationTime)} /> : token.ExpirationTime === undefined ? 'it is revoked' : <>{isOver && <Status tone="idle" word="expired" />} {utc(token.ExpirationTime)}</>}</td>
                <td data-name="End it">
                  {!isOver && (
                    <Button size="compact-xs" variant="default" onClick={() => setAsked(token)} aria-label={`Revoke ${token.TokenId}`}>
                      Revoke
                    </Button>
                  )}
                </td>
              </tr>
            )
          })}
        </tbody>
      </table>
      <ConfirmByName
        name={asked?.TokenId ?? ''}
        verb="Revoke"
        opened={asked !== undefined}
        onClose={() => setAsked(undefined)}
        onConfirm={async () => {
          await call('RevokeToken', { TokenId: asked!.TokenId })
          await client.invalidateQueries()
        }}
      >
        <p>Whoever uses it is refused from now on, also in browsers that are signed in with it. Agents that have joined stay.</p>
        {asked?.TokenId === own && <p>You are signed in with it: this session ends, too.</p>}
      </ConfirmByName>
    </div>
  )
}
