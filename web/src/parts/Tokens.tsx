/** The tokens of people, programs and nodes: an administrator creates and revokes them. */
import '@mantine/core/styles/Switch.css'
import { Button, NativeSelect, Switch, TextInput } from '@mantine/core'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'

import { call } from '../api/client'
import { tokensQuery } from '../api/queries'
import type { CreateTokenRequest, Token } from '../contract'
import { utc } from '../model/format'
import { TOKENS } from '../words/settings'
import { Ago, Command, Problem, Shown, Status, useNow } from './Basics'
import { Card } from './Card'
import { ConfirmByName } from './ConfirmByName'
import { CopyId } from './CopyId'

const DAY_SECONDS = 86_400
const ROLES = ['viewer', 'submitter', 'admin'] as const

/** `own`: id of the session's token. */
export function Tokens({ own }: { own: string }) {
  const [withEnded, setWithEnded] = useState(false)
  const query = useQuery(tokensQuery(withEnded))
  const toggle = (
    <Switch
      size="xs"
      label={TOKENS.withEnded}
      checked={withEnded}
      onChange={(event) => setWithEnded(event.currentTarget.checked)}
    />
  )
  return (
    <Card title={TOKENS.title} actions={toggle}>
      <div className="stack">
        <CreateToken />
        <Shown query={query}>{(tokens) => <TokenTable tokens={tokens} own={own} />}</Shown>
      </div>
    </Card>
  )
}

function CreateToken() {
  const client = useQueryClient()
  const [role, setRole] = useState<CreateTokenRequest['Role']>('viewer')
  const [project, setProject] = useState('')
  const [description, setDescription] = useState('')
  const [days, setDays] = useState('30')
  const [secret, setSecret] = useState('')
  const [error, setError] = useState<unknown>()
  const [isBusy, setBusy] = useState(false)
  const words = TOKENS.form
  if (secret) return <Secret secret={secret} onDone={() => setSecret('')} />
  const create = () => {
    setBusy(true)
    setError(undefined)
    call('CreateToken', {
      Role: role,
      ...(project && role !== 'admin' ? { Project: project } : {}),
      ...(description ? { Description: description } : {}),
      ...(days ? { ExpiresInSeconds: Number(days) * DAY_SECONDS } : {}),
    })
      .then((created) => {
        setSecret(created.Secret)
        setDescription('')
        return client.invalidateQueries({ queryKey: ['tokens'] })
      }, setError)
      .finally(() => setBusy(false))
  }
  return (
    <form
      className="row fields"
      onSubmit={(event) => {
        event.preventDefault()
        create()
      }}
    >
      <NativeSelect
        size="xs"
        label={words.role}
        value={role}
        data={ROLES.map((value) => ({ value, label: words.roles[value] }))}
        onChange={(event) => setRole(event.currentTarget.value as typeof role)}
      />
      <TextInput
        size="xs"
        label={words.project}
        placeholder={words.everyProject}
        value={role === 'admin' ? '' : project}
        disabled={role === 'admin'}
        onChange={(event) => setProject(event.currentTarget.value.trim())}
        autoComplete="off"
        spellCheck={false}
      />
      <TextInput
        size="xs"
        label={words.owner}
        value={description}
        onChange={(event) => setDescription(event.currentTarget.value)}
        autoComplete="off"
      />
      <NativeSelect
        size="xs"
        label={words.lifetime}
        value={days}
        data={words.lifetimes.map(([value, label]) => ({ value, label }))}
        onChange={(event) => setDays(event.currentTarget.value)}
      />
      <Button size="xs" type="submit" loading={isBusy}>
        {words.create}
      </Button>
      {error !== undefined && <Problem error={error} title={words.failed} />}
    </form>
  )
}

function Secret({ secret, onDone }: { secret: string; onDone: () => void }) {
  const words = TOKENS.secret
  return (
    <section className="banner tone-warn" role="status" aria-label={words.label}>
      <div className="stack" style={{ minWidth: 0 }}>
        <strong>{words.text}</strong>
        <Command text={secret} />
        <div>
          <Button size="xs" variant="default" onClick={onDone}>
            {words.done}
          </Button>
        </div>
      </div>
    </section>
  )
}

function TokenTable({ tokens, own }: { tokens: Token[]; own: string }) {
  const client = useQueryClient()
  const [chosen, setChosen] = useState<Token>()
  const columns = TOKENS.columns
  return (
    <div className="scroll" tabIndex={0} role="region" aria-label={TOKENS.title}>
      <table className="grid stacked">
        <thead>
          <tr>
            <th>{columns.token}</th>
            <th>{columns.role}</th>
            <th>{columns.scope}</th>
            <th>{columns.owner}</th>
            <th>{columns.created}</th>
            <th>{columns.ends}</th>
            <th>
              <span className="visually-hidden">{columns.action}</span>
            </th>
          </tr>
        </thead>
        <tbody>
          {tokens.map((token) => (
            <TokenRow key={token.TokenId} token={token} isOwn={token.TokenId === own} onRevoke={setChosen} />
          ))}
        </tbody>
      </table>
      <ConfirmByName
        name={chosen?.TokenId ?? ''}
        verb={TOKENS.revoke}
        opened={chosen !== undefined}
        onClose={() => setChosen(undefined)}
        onConfirm={async () => {
          await call('RevokeToken', { TokenId: chosen!.TokenId })
          await client.invalidateQueries()
        }}
      >
        <p>{TOKENS.effect}</p>
        {chosen?.TokenId === own && <p>{TOKENS.ownEffect}</p>}
      </ConfirmByName>
    </div>
  )
}

interface TokenRowProps {
  token: Token
  isOwn: boolean
  onRevoke: (token: Token) => void
}

function TokenRow({ token, isOwn, onRevoke }: TokenRowProps) {
  const now = useNow()
  const isExpired = token.ExpirationTime !== undefined && token.ExpirationTime <= now
  const isOver = token.RevocationTime !== undefined || isExpired
  const columns = TOKENS.columns
  const owner = token.Description || '–'
  return (
    <tr>
      <td data-name={columns.token}>
        <CopyId id={token.TokenId} />
      </td>
      <td className="nowrap" data-name={columns.role}>
        {token.Kind === 'join' ? TOKENS.joins : token.Role}
      </td>
      <td className="nowrap" data-name={columns.scope}>
        {token.FleetName ? TOKENS.fleet(token.FleetName) : (token.Project ?? TOKENS.form.everyProject)}
      </td>
      <td data-name={columns.owner}>{isOwn ? TOKENS.own(owner) : owner}</td>
      <td className="moment" data-name={columns.created}>
        <Ago at={token.CreationTime} />
      </td>
      <td className="moment" data-name={columns.ends}>
        <Expiry token={token} isExpired={isExpired} />
      </td>
      <td data-name={columns.action}>
        {!isOver && (
          <Button
            size="compact-sm"
            variant="default"
            onClick={() => onRevoke(token)}
            aria-label={TOKENS.revokeToken(token.TokenId)}
          >
            {TOKENS.revoke}
          </Button>
        )}
      </td>
    </tr>
  )
}

function Expiry({ token, isExpired }: { token: Token; isExpired: boolean }) {
  if (token.RevocationTime !== undefined) {
    return <Status tone="idle" word={TOKENS.revoked} title={utc(token.RevocationTime)} />
  }
  if (token.ExpirationTime === undefined) return TOKENS.never
  return (
    <>
      {isExpired && <Status tone="idle" word={TOKENS.expired} />} {utc(token.ExpirationTime)}
    </>
  )
}
